"""Small models in bf16 on a GPU, by Transformer Engine and flash attention, against float32 on the CPU.

The measure is what bf16 costs by itself: the same model in bf16 on the CPU, where Megatron's own layers and attention
in tables compute it. Both round all activations and differ in where they round inside a layer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import REPOSITORY
from limits import limit

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
JOB = Path(__file__).with_name("gpu_numbers_job.py")
TIMES = 3
"""How many times as far off as bf16 on the CPU a result may be."""
ROUNDING = 2.0**-8
"""Most that rounding to bf16 changes a number by, relative to it."""


@pytest.fixture(scope="module", params=["dense", "moe", "latent"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], ...]:
    """What the job gives in float32 and in bf16 on the CPU, and in bf16 on the GPU."""
    folder = tmp_path_factory.mktemp(request.param)
    exact, measure, found = (folder / name for name in ("exact", "measure", "found"))
    run(request.param, exact, CUDA_VISIBLE_DEVICES="")
    run(request.param, measure, exact, CUDA_VISIBLE_DEVICES="")
    run(request.param, found, exact)
    return tuple(torch.load(file, weights_only=False) for file in (exact, measure, found))


def run(*arguments: object, **environment: str) -> None:
    """The job as a process of its own, which may not see the GPU."""
    paths = os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "kernels")))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, str(JOB), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit(600))
    assert done.returncode == 0, f"{arguments}: {done.stderr[-4000:]}"


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Relative to the other."""
    return float((one.double() - other.double()).norm() / other.double().norm())


def test_the_parts_of_a_gpu_were_there(runs: tuple[dict[str, Any], ...]) -> None:
    exact, measure, found = runs
    assert exact["attention"] == measure["attention"] == "padded"
    assert found["attention"] == "torch"
    if not found["transformer engine"]:
        pytest.skip("Transformer Engine is not installed: Megatron's own layers were compared")


def test_logprobs(runs: tuple[dict[str, Any], ...]) -> None:
    """Relative to how much they vary; those of the backward pass are the same."""
    exact, measure, found = (run["logprobs"] - runs[0]["logprobs"].mean() for run in runs)
    assert distance(found, exact) <= TIMES * distance(measure, exact)
    again = runs[2]["of the backward pass"]
    assert distance(again - runs[0]["logprobs"].mean(), found) <= ROUNDING


def test_every_token_goes_to_its_experts(runs: tuple[dict[str, Any], ...]) -> None:
    """Their choice is clear enough for bf16."""
    exact, measure, found = (run["loads"] for run in runs)
    assert found == measure == exact


def test_gradients(runs: tuple[dict[str, Any], ...]) -> None:
    """Of every parameter, relative to its own; where the CPU is nearer than with all of them, by luck, as with all."""
    exact, measure, found = (run["gradients"] for run in runs)
    assert exact.keys() == measure.keys() == found.keys()
    whole = [torch.cat([of[name].flatten() for name in exact]) for of in (exact, measure, found)]
    of_all = distance(whole[1], whole[0])
    assert distance(whole[2], whole[0]) <= TIMES * of_all
    off = {
        name: (distance(found[name], gradient), max(of_all, distance(measure[name], gradient)))
        for name, gradient in exact.items()
    }
    wrong = {name: (error, of_bf16) for name, (error, of_bf16) in off.items() if not error <= TIMES * of_bf16}
    assert not wrong, f"{len(wrong)} of {len(off)}: {wrong}"
