"""Chooses the ranks of a job to rehearse, and runs their processes one after the other."""

from __future__ import annotations

import json
import math
import os
import platform as machine
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mega.config.derived import attention_on_gpu
from grpo_mega.config.schema import Config, LayoutConfig, ModelConfig
from grpo_mega.errors import ConfigError, InputError
from grpo_mega.forecast.planning.lines import OTHERS
from grpo_mega.forecast.rehearsal.spec import BAD_SETTINGS, RankSpec, balanced, skewed
from grpo_mega.models.schedule import cells_per_token

AT_WORK = ("activations kept", "one layer, saved", "one layer, at work", "output layer")
"""The planner's lines for memory that comes and goes within a step; the rest is held."""
UNSEEN = 508 * 2**20
"""Bytes that nvidia-smi counts and CUDA does not: an H100 has 81,559 MiB for one and 81,051 for the other."""
CUDA = "lib/python3*/site-packages/nvidia/cu13/lib"
"""CUDA's libraries in an environment, as a pattern."""


class NoEnvironment(Exception):
    """This machine cannot rehearse; says what to do."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment with a CUDA build of torch and the null GPU.

    Attributes:
        folder: Its folder.
    """

    folder: Path

    @classmethod
    def find(cls, repository: Path) -> Environment:
        """Finds the environment of `make .venv-rehearse/.ready`.

        Raises:
            NoEnvironment: This machine cannot have one, or has none.
        """
        if (sys.platform, machine.machine()) != ("linux", "x86_64"):
            raise NoEnvironment(
                f"the null GPU stands in for CUDA's libraries for Linux on x86_64, and this is {sys.platform} on "
                f"{machine.machine()}: rehearse on such a machine"
            )
        folder = repository / ".venv-rehearse"
        if not (folder / "nullgpu" / "libnullgpu.so").exists():
            raise NoEnvironment(
                f"{folder} is missing: make .venv-rehearse/.ready installs torch for CUDA there (7 GB) and compiles "
                "the null GPU"
            )
        if not [*folder.glob(f"{CUDA}/libcudart.so.13")]:
            raise NoEnvironment(
                f"{folder} has no torch for CUDA 13: remove it, and run make .venv-rehearse/.ready with an index that "
                "has the default build of torch"
            )
        return cls(folder)

    def run(self, program: Path, spec: RankSpec) -> dict[str, Any]:
        """Rehearses one rank; returns what it measured.

        Raises:
            InputError: The settings cannot run in this environment; a ConfigError if they have several problems.
            RuntimeError: The process failed otherwise than by a lack of memory; has its last lines.
        """
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / "measured.json"
            # If C code crashes, the output ends with the Python stack.
            command = [self.folder / "bin" / "python", "-X", "faulthandler", program, spec.to_json(), out]
            done = subprocess.run([*map(str, command)], env=self._variables(spec), capture_output=True, text=True)
            if done.returncode == BAD_SETTINGS and out.exists():
                raise ConfigError.of([InputError(*one) for one in json.loads(out.read_text())])
            if done.returncode or not out.exists():
                raise RuntimeError(
                    f"the rehearsal of rank {spec.rank} ended with code {done.returncode}:\n{done.stderr[-4000:]}"
                )
            return json.loads(out.read_text())

    def _variables(self, spec: RankSpec) -> Mapping[str, str]:
        libraries = self.folder / "nullgpu"
        # Planning needs an empty CUDA_VISIBLE_DEVICES, from which torch would conclude that there is no GPU.
        kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        return kept | {
            "LD_PRELOAD": str(libraries / "libnullgpu.so"),
            "LD_LIBRARY_PATH": str(libraries),
            "NULLGPU_BYTES": str(spec.capacity),
            "NULLGPU_TAKEN": str(spec.taken),
            # cuDNN's attention asks a GPU which plans it has; torch's own kernels take the same memory.
            "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
            # NVRTC ends a process with the null GPU; Transformer Engine has kernels that are compiled already.
            "NVTE_DISABLE_NVRTC": "1",
            "OMP_NUM_THREADS": "1",
            "LOCAL_RANK": "0",
        }


def specs(
    config: Config, settings: Sequence[str], planned: dict[str, Any], rank: str, lengths: str, imbalance: float
) -> Iterator[RankSpec]:
    """Yields the ranks to rehearse.

    Args:
        config: The configuration of `settings`.
        settings: Experiment and overrides.
        planned: The plan of `config`.
        rank: A number; "all-stages": the first rank of every pipeline stage; "worst": these, balanced and skewed.
        lengths: "balanced", "skewed", or tokens of each sequence of a replica, with commas.
        imbalance: See `RankSpec`.

    Raises:
        InputError: The rank or its sequences do not exist, or cannot be rehearsed.
    """
    if config.cluster.gpu_memory_mib is None:
        where = f"cluster.gpu_memory_mib=null of {config.run.name}"
        raise InputError(where, "names no GPUs", "give cluster=h100, or choose an experiment for GPUs")
    if not (imbalance > 0 and math.isfinite(imbalance)):
        raise InputError(f"--imbalance={imbalance:g}", "not a number above 0", "choose 1 for balanced experts")
    world_size, stages = planned["gpus"], config.layout.pp
    # Megatron numbers ranks with the pipeline as the slowest axis, so each stage has consecutive ranks.
    firsts = [stage * world_size // stages for stage in range(stages)]
    if rank not in ("worst", "all-stages") and not (rank.isdecimal() and int(rank) < world_size):
        fix = f"choose 0 to {world_size - 1}, all-stages or worst"
        raise InputError(f"--rank={rank}", f"the job has {world_size} ranks", fix)
    ranks = firsts if rank in ("worst", "all-stages") else [int(rank)]
    kinds = ("balanced", "skewed") if rank == "worst" and lengths == "balanced" else (lengths,)
    for number in ranks:
        lines = planned["memory"][number * stages // world_size]
        seen = set()
        for kind in kinds:
            tokens = _lengths(config.layout, config.model, kind)
            # Balanced and skewed lengths may be the same, and are then rehearsed once.
            if tokens not in seen:
                seen.add(tokens)
                yield RankSpec(
                    settings=tuple(settings),
                    rank=number,
                    world_size=world_size,
                    lengths=tokens,
                    imbalance=imbalance,
                    sequences=kind if kind in ("balanced", "skewed") else "given",
                    capacity=int(planned["capacity"]) - UNSEEN,
                    # A run without DeepEP has no line for its buffers.
                    taken=int(sum(lines.get(name, 0) for name in OTHERS)),
                )


def _lengths(layout: LayoutConfig, model: ModelConfig, kind: str) -> tuple[int, ...]:
    if kind == "balanced":
        return balanced(layout, model.context)
    if kind == "skewed":
        padded = attention_on_gpu(layout, model) == "padded"
        return skewed(layout, model.context, cells_per_token(layout.cp, padded))
    words = kind.split(",")
    if not all(word.strip().isdecimal() for word in words):
        fix = "give balanced, skewed, or numbers of tokens with commas, as in 33000,8000"
        raise InputError(f"--lengths={kind}", "not lengths", fix)
    lengths = tuple(int(word) for word in words)
    for length in lengths:
        if not 2 <= length <= model.context:
            what = f"a sequence has 2 to model.context={model.context} tokens"
            raise InputError(f"--lengths={length}", what, "give a length between, or raise model.context")
    return lengths
