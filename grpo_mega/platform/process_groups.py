"""The memory that process groups keep on a device, given back while somebody else has it.

NCCL keeps buffers for every group that has been used, 7 GB of each GPU under TP2 x PP2 x DP2 and 9.5 GB with experts
(measured by verl's pull request 6408). From torch 2.12 and NCCL 2.29.7 on a group can be suspended: it gives back most
of it and stays what it is, so nothing that refers to it has to be made anew.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import Backend
from torch.distributed import distributed_c10d

NEEDED = (2, 29, 7)
"""The first NCCL that can suspend."""
UNUSED = "not initialized"
"""What torch says of a group through which nothing was sent yet."""


def can_suspend() -> bool:
    """Whether torch and its NCCL can; of machines without a GPU, whether torch could elsewhere."""
    return hasattr(Backend, "suspend") and (not torch.cuda.is_available() or torch.cuda.nccl.version() >= NEEDED)


def suspend(device: torch.device, suspended: list[Any]) -> None:
    """Suspends all groups of NCCL's on a device, and adds them to `suspended`. All ranks of the job must call it.

    Until `resume` nothing may be sent through them. Groups are taken in the order in which they were made, which is the
    same on all ranks: NCCL has the ranks of each wait for each other.

    Raises:
        RuntimeError: NCCL failed; what was suspended until then is in the list.
    """
    groups = [group for group in distributed_c10d._world.pg_map if torch.device(device.type) in group._device_types]
    for backend in (group._get_backend(device) for group in groups):
        if backend.name() == "nccl" and _suspended(backend):
            suspended.append(backend)


def resume(suspended: list[Any]) -> None:
    """Makes groups usable again, and removes them from the list; all ranks of the job must call it.

    Raises:
        RuntimeError: NCCL failed, perhaps for want of memory; it can be called again.
    """
    while suspended:
        suspended[0].resume()
        suspended.pop(0)


def _suspended(backend: Any) -> bool:
    """Suspends it, if there is something to suspend."""
    try:
        backend.suspend()
    except RuntimeError as error:
        if UNUSED not in str(error):
            raise
        return False
    return True
