"""Random number generators of every rank: saved with a checkpoint, restored if the layout is the same.

Nothing uses them today, since sampling noise is a function of counters, but dropout might. The user's reward functions
have separate generators, seeded for every call (`reward/user_worker.py`).
"""

from __future__ import annotations

import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from grpo_mega.checkpoint.integrity import files_in_manifest
from grpo_mega.checkpoint.safe_load import load_tensors

FOLDER = "random"


def save(checkpoint: Path) -> None:
    """Writes this rank's generators into the checkpoint, whose folder `random` exists."""
    torch.save({"layout": _layout(), "generators": current()}, _file(checkpoint))


def load(checkpoint: Path, seed: int, step: int) -> None:
    """Restores this rank's generators; under another layout than the checkpoint's they are reseeded."""
    file = _file(checkpoint)
    saved = load_tensors(file) if str(file.relative_to(checkpoint)) in files_in_manifest(checkpoint) else None
    if saved and saved["layout"] == _layout():
        restore(saved["generators"])
    else:
        reseed(seed, step)


def reseed(seed: int, step: int) -> None:
    """Seeds every generator from the run's seed, the step and the rank; Megatron's generators by its own rules."""
    # crc32 rather than hash(), which differs between processes; its 32 bits are what numpy accepts as a seed.
    number = zlib.crc32(f"{seed}/{step}".encode())
    # Megatron derives the generators of tensor and expert ranks from a number that must be the same on all ranks; the
    # generators below differ on every rank.
    tensor_parallel.model_parallel_cuda_manual_seed(number)
    mine = zlib.crc32(f"{seed}/{step}/{dist.get_rank()}".encode())
    random.seed(mine)
    np.random.seed(mine)
    torch.default_generator.manual_seed(mine)


def current() -> dict[str, Any]:
    """States of this rank's generators, in the format of `restore`."""
    numbers = np.random.get_state(legacy=False)
    assert isinstance(numbers, dict)
    return {
        "python": random.getstate(),
        # As a list: the file is read by code that accepts only tensors and plain values, see safe_load.py.
        "numpy": numbers | {"state": {"key": numbers["state"]["key"].tolist(), "pos": numbers["state"]["pos"]}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "megatron": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def restore(states: dict[str, Any]) -> None:
    """Restores this rank's generators to states returned by `current`."""
    random.setstate(states["python"])
    key = np.array(states["numpy"]["state"]["key"], dtype=np.uint32)
    np.random.set_state(states["numpy"] | {"state": {"key": key, "pos": states["numpy"]["state"]["pos"]}})
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["megatron"])


def _file(checkpoint: Path) -> Path:
    return checkpoint / FOLDER / f"rank-{dist.get_rank():05d}.pt"


def _layout() -> list[int]:
    """Sizes of the layout: generators are restored only if all of them are equal."""
    return [
        dist.get_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_world_size(),
    ]
