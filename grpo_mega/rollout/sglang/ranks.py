"""How the ranks of a job stand to its SGLang engines: which of them share one, who hosts its processes, who owns it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

FOREVER = timedelta(days=7)
"""Time limit of collectives that wait for engines, whose own limits are in `rollout.sglang`."""


@dataclass(frozen=True)
class Ranks:
    """Where this rank stands.

    Attributes:
        engine: Number of the engine that it shares.
        members: The ranks that share each engine, by its number.
        place: Which of its engine's ranks it is.
        nodes, node: Over how many nodes its engine is spread, and on which of them it is itself.
        hosting: The rank that hosts the process of its engine on this node.
        everyone: All ranks, for tensors on the CPU.
        group: The ranks of its engine, likewise.
    """

    engine: int
    members: list[list[int]]
    place: int
    nodes: int
    node: int
    hosting: int
    everyone: dist.ProcessGroup
    group: dist.ProcessGroup

    @property
    def mine(self) -> list[int]:
        """The ranks of its engine."""
        return self.members[self.engine]

    @property
    def hosts(self) -> bool:
        """Whether it hosts a process of its engine: the first of the engine's ranks on each node does."""
        return dist.get_rank() == self.hosting

    @property
    def owns(self) -> bool:
        """Whether it talks to its engine: the first of the engine's ranks does."""
        return self.place == 0

    def gather(self, mine: Any) -> list[Any]:
        """What every rank has, by rank."""
        theirs: list = [None] * dist.get_world_size()
        dist.all_gather_object(theirs, mine, group=self.everyone)
        return theirs

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """Which of the flags hold on any rank."""
        state = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(state, dist.ReduceOp.MAX, group=self.everyone)
        return [*map(bool, state.tolist())]


def ranks_of_engines(tp: int) -> Ranks:
    """Shares out all ranks over engines of `tp` consecutive ranks; every rank must call it.

    Raises:
        ValueError: An engine would have a part of a node that does not divide it, or not whole nodes.
    """
    on_node = _ranks_on_node(tp)
    engine, place = divmod(dist.get_rank(), tp)
    members = [[*range(first, first + tp)] for first in range(0, dist.get_world_size() // tp * tp, tp)]
    everyone = dist.new_group(backend="gloo", timeout=FOREVER)
    group, _ = dist.new_subgroups_by_enumeration(members, timeout=FOREVER, backend="gloo")
    hosting = dist.get_rank() - place % on_node
    return Ranks(engine, members, place, tp // on_node, place // on_node, hosting, everyone, group)


def _ranks_on_node(tp: int) -> int:
    """How many ranks of a node share an engine of `tp` ranks."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    if here % tp and tp % here:
        raise ValueError(
            f"rollout.sglang.tp={tp}: an engine has a part of a node that divides its {here} processes, or several "
            "whole nodes"
        )
    return min(tp, here)
