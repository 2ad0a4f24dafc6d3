"""What ranks agree on about files and settings: one of them decides for all, or all have to succeed.

These go over the hosts' network, not the devices': they have nothing to do with devices, and NCCL gives up soon.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

Answer = TypeVar("Answer")

PATIENCE = timedelta(hours=6)
"""How long ranks wait for work on files: the main rank alone may write for minutes, and file systems stall. A rank that
dies ends the wait at once."""
_groups: dict[Any, Any] = {}


def main_says(ask: Callable[[], Answer]) -> Answer:
    """What `ask` answers on the main rank, on all ranks."""
    said = [ask() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(said, src=0, group=host_group())
    return said[0]  # type: ignore[return-value]


def if_all_can(work: Callable[[], None]) -> None:
    """Does `work` on every rank, and ends only when all have done it.

    Raises:
        RuntimeError: It failed on some rank; raised on all of them, so that none waits for another. Names the ranks.
    """
    try:
        work()
        mine = None
    except Exception as error:  # whatever it is, the others must hear of it
        mine = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine, group=host_group())
    if failed := [problem for problem in everyone if problem]:
        raise RuntimeError("; ".join(failed))


def host_group() -> Any:
    """All ranks, over the network of their hosts: devices have nothing to do with files, and NCCL gives up soon."""
    world = dist.group.WORLD
    if world not in _groups:
        _groups.clear()  # those of a job before, in the same process
        _groups[world] = dist.new_group(backend="gloo", timeout=PATIENCE)
    return _groups[world]
