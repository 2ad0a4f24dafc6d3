"""Frees the device memory of process groups while an engine uses the device.

NCCL keeps buffers for every used group, 7 GB of each GPU under TP2 x PP2 x DP2 and 9.5 GB with experts (measured by
verl's pull request 6408). From torch 2.12 with NCCL 2.29.7 on, a group can be suspended: it frees most of its memory
and remains valid, so that whatever refers to it can be kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import Backend
from torch.distributed import distributed_c10d

NEEDED = (2, 29, 7)
"""First version of NCCL that can suspend groups."""
UNUSED = "not initialized"
"""Part of torch's error for a group that has not been used yet."""


def can_suspend() -> bool:
    """Whether torch and its NCCL can suspend groups; without a GPU only torch is checked."""
    return hasattr(Backend, "suspend") and (not torch.cuda.is_available() or torch.cuda.nccl.version() >= NEEDED)


def suspend(device: torch.device, suspended: list[Any]) -> None:
    """Suspends all NCCL groups on a device, and appends them to `suspended`; all ranks of the job must call it.

    They must not be used until `resume`. Groups are suspended in the order of their creation, which is the same on all
    ranks: in NCCL the ranks of a group wait for each other.

    Raises:
        RuntimeError: NCCL failed; the list has the groups that were suspended before.
    """
    groups = [group for group in distributed_c10d._world.pg_map if torch.device(device.type) in group._device_types]
    for backend in (group._get_backend(device) for group in groups):
        # Appended one by one, so that after a failure the caller can resume exactly those that were suspended.
        if backend.name() == "nccl" and _suspended(backend):
            suspended.append(backend)


def resume(suspended: list[Any]) -> None:
    """Makes groups usable again, and removes them from the list; all ranks of the job must call it.

    Raises:
        RuntimeError: NCCL failed, perhaps for lack of memory; `resume` can be called again.
    """
    while suspended:
        # Removed only once it has succeeded, so that a second call continues with the group that failed.
        suspended[0].resume()
        suspended.pop(0)


def _suspended(backend: Any) -> bool:
    """Suspends a group if it was used, and returns whether it was."""
    try:
        backend.suspend()
    except RuntimeError as error:
        if UNUSED not in str(error):
            raise
        return False
    return True
