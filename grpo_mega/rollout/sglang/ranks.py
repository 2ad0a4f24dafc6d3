"""Assignment of ranks to SGLang engines: which ranks share one, host its processes, and own it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from grpo_mega.errors import InputError

FOREVER = timedelta(days=7)
"""Time limit of collectives that wait for engines, which have their own limits in `rollout.sglang`."""


@dataclass(frozen=True)
class Ranks:
    """Ranks of every engine, and this rank's role in its own.

    Attributes:
        engine: Number of this rank's engine.
        members: Ranks that share each engine, by the engine's number.
        engine_rank: Index of this rank among those that share its engine.
        nodes, node: Number of nodes that its engine is spread over, and the index of this rank's node among them.
        host: The rank that hosts the process of its engine on this node.
        all_ranks: Process group of all ranks, for tensors on the CPU.
        group: Process group of the ranks that share its engine, for tensors on the CPU.
    """

    engine: int
    members: list[list[int]]
    engine_rank: int
    nodes: int
    node: int
    host: int
    all_ranks: dist.ProcessGroup
    group: dist.ProcessGroup

    @property
    def of_engine(self) -> list[int]:
        """Ranks that share this rank's engine."""
        return self.members[self.engine]

    @property
    def hosts(self) -> bool:
        """Whether this rank hosts a process of its engine, as the first of the engine's ranks on each node does."""
        return dist.get_rank() == self.host

    @property
    def owns(self) -> bool:
        """Whether this rank owns (talks to) its engine, as the first of the engine's ranks does."""
        return self.engine_rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Gathers a value from all ranks, by rank."""
        values: list = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self.all_ranks)
        return values

    def sum(self, counts: Sequence[int]) -> list[int]:
        """The sum of each count over all ranks; for a flag, the number of ranks that set it."""
        sums = torch.tensor(counts, dtype=torch.int64)
        dist.all_reduce(sums, group=self.all_ranks)
        return sums.tolist()

    def from_owner(self, values: Sequence[Any]) -> Any:
        """Scatters each engine owner's values, one for each rank of the engine; returns this rank's value."""
        received: list = [None]
        dist.scatter_object_list(received, [*values] if self.owns else None, self.of_engine[0], group=self.group)
        return received[0]


def ranks_of_engines(tp: int) -> Ranks:
    """Divides all ranks into engines of `tp` consecutive ranks; every rank must call it.

    Raises:
        InputError: An engine's ranks neither divide a node nor fill whole nodes.
    """
    node_size = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    if node_size % tp and tp % node_size:
        raise InputError(
            f"rollout.sglang.tp={tp}",
            "an engine cannot use a part of a second node",
            f"use a divisor of the {node_size} processes of a node, or a multiple of them",
        )
    # Ranks of one node that share an engine.
    on_node = min(tp, node_size)
    engine, engine_rank = divmod(dist.get_rank(), tp)
    members = [[*range(first, first + tp)] for first in range(0, dist.get_world_size() // tp * tp, tp)]
    # Groups on gloo, because the trainer's NCCL groups are suspended while an engine has the GPU; and separate ones,
    # because they must wait for as long as an engine may be silent, which is longer than a collective may take.
    all_ranks = dist.new_group(backend="gloo", timeout=FOREVER)
    group, _ = dist.new_subgroups_by_enumeration(members, timeout=FOREVER, backend="gloo")
    host = dist.get_rank() - engine_rank % on_node
    return Ranks(engine, members, engine_rank, tp // on_node, engine_rank // on_node, host, all_ranks, group)
