"""Collectives of the ranks over their hosts' network: broadcast from the main rank, joint success, all-to-all.

They use gloo: files, rewards and samples are not on devices, and NCCL would time out while ranks wait for them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from grpo_mega.platform.stop import FailedElsewhere, FailedOutside
from grpo_mega.platform.trace import span

Result = TypeVar("Result")

PATIENCE = timedelta(hours=6)
"""Time limit of a wait for other ranks. It is long because the main rank may write for minutes, file systems stall and
rewards take time; it need not be short, as the wait ends at once when a rank dies."""
_groups: dict[Any, Any] = {}


def from_main_rank(ask: Callable[[], Result]) -> Result:
    """The result of `ask()` on the main rank (0), returned on all ranks; only that rank calls it."""
    answer = [ask() if dist.get_rank() == 0 else None]
    with span("wait"):
        dist.broadcast_object_list(answer, src=0, group=host_group())
    return answer[0]  # type: ignore[return-value]


def succeed_together(work: Callable[[], None]) -> None:
    """Calls `work()` on every rank; returns when all ranks have finished.

    Raises:
        RuntimeError: `work` failed on some rank; raised on all ranks, so that none waits for another. Names the ranks.
    """
    from_all_ranks(work)


def from_all_ranks(work: Callable[[], Result]) -> list[Result]:
    """Calls `work` on every rank; returns all results, by rank, on all ranks.

    Raises:
        RuntimeError: `work` failed on some rank; see `succeed_together`.
        ValueError: `work` failed, with a ValueError on every rank on which it failed.
        FailedOutside: The same for `FailedOutside`; the message is the first rank's, with the number of other ranks.

    The error's cause is the exception of `work` on this rank, or `FailedElsewhere`.
    """
    mine, failure = None, None
    try:
        mine = work()
    except Exception as error:
        # Any failure must reach the other ranks, which would otherwise wait for this one until the timeout.
        failure = error
    # The kind decides how the run ends: a ValueError is bad input only if every failing rank met one.
    kind = next((kind for kind in (ValueError, FailedOutside) if isinstance(failure, kind)), RuntimeError)
    named = "" if kind is FailedOutside else f"{type(failure).__name__}: "
    problem = f"rank {dist.get_rank()}: {named}{failure}" if failure else None
    everyone: list[Any] = [None] * dist.get_world_size()
    with span("wait"):
        dist.all_gather_object(everyone, (mine, problem, kind), group=host_group())
    if failed := [(problem, kind) for _, problem, kind in everyone if problem]:
        first, first_kind = failed[0]
        # The list is the same on all ranks, so all of them raise the same error.
        same = first_kind if all(kind is first_kind for _, kind in failed) else RuntimeError
        others = f"\n({len(failed)} ranks failed in the same call)" if len(failed) > 1 else ""
        told = f"{first}{others}" if same is FailedOutside else "; ".join(problem for problem, _ in failed)
        raise same(told) from failure or FailedElsewhere("not on this rank")
    return [theirs for theirs, *_ in everyone]


def on_main_rank(work: Callable[[], Result]) -> list[Result]:
    """Calls `work` on every rank; returns all results, by rank, on the main rank (0), and [] on the others.

    Raises:
        RuntimeError, ValueError: As in `from_all_ranks`.
    """
    nothing: list[Any] = [None] * (dist.get_world_size() - 1)
    found = to_each_rank(lambda: [work(), *nothing])
    return found if dist.get_rank() == 0 else []


def to_each_rank(work: Callable[[], Sequence[Result]]) -> list[Result]:
    """Calls `work` on every rank for one object per rank; returns those for this rank, by rank.

    For objects of megabytes: unlike `from_all_ranks`, it sends no padding, and nothing to ranks that do not want it.

    Raises:
        RuntimeError, ValueError: As in `from_all_ranks`.
    """
    mine: list[bytearray] = []

    def sizes() -> list[int]:
        mine.extend(bytearray(pickle.dumps(one)) for one in work())
        return [len(one) for one in mine]

    coming = [of_rank[dist.get_rank()] for of_rank in from_all_ranks(sizes)]
    received = exchange([torch.frombuffer(one, dtype=torch.uint8) for one in mine], coming)
    return [pickle.loads(part.numpy().tobytes()) for part in received.split(coming)]


def exchange(parts: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """All-to-all exchange of vectors; every rank must call it.

    Args:
        parts: Vectors to send to each rank, on the CPU and of one dtype.
        sizes: Number of elements that each rank sends to this one.

    Returns:
        The vectors sent to this rank, concatenated in the order of ranks.
    """
    dtype = parts[0].dtype
    # Sent as bytes, since gloo does not support all dtypes.
    sent = torch.cat([part.view(torch.uint8) for part in parts])
    received = torch.empty(sum(sizes) * dtype.itemsize, dtype=torch.uint8)
    coming, going = [size * dtype.itemsize for size in sizes], [len(part) * dtype.itemsize for part in parts]
    dist.all_to_all_single(received, sent, coming, going, group=host_group())
    return received.view(dtype)


def host_group() -> Any:
    """The gloo process group of all ranks, over the network of their hosts, with the time limit `PATIENCE`."""
    world = dist.group.WORLD
    if world not in _groups:
        # Groups of an earlier job in the same process are dropped: they belong to a destroyed world.
        _groups.clear()
        _groups[world] = dist.new_group(backend="gloo", timeout=PATIENCE)
    return _groups[world]
