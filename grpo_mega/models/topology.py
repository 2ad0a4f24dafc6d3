"""Which process holds which part of the model and of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import distributed_c10d

from grpo_mega.config.schema import LayoutConfig
from grpo_mega.platform.collectives import host_group

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Topology:
    """This process's place in the layout.

    Attributes:
        rank: Global rank.
        world_size: Number of processes.
        tp_size: Ranks that share one layer.
        pp_rank, pp_size: Pipeline stage.
        cp_rank, cp_size: Part of every sequence (context parallelism).
        dp_rank, dp_size: Data parallel replica.
        interleaved: Whether pipeline ranks hold several pieces of the model.
        lock_step: The ranks that generate in lock-step with this one: those of its replica, those that share experts
            with one of them, the replicas of these, and so on.
    """

    rank: int
    world_size: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int
    dp_rank: int
    dp_size: int
    interleaved: bool
    lock_step: dist.ProcessGroup

    @property
    def is_last_stage(self) -> bool:
        """Whether this process sees logits."""
        return self.pp_rank == self.pp_size - 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes what is written once."""
        return self.rank == 0

    @property
    def row_multiple(self) -> int:
        """A rank's packed rows must be a multiple of it; rotary embeddings cut a context parallel rank's in half."""
        return self.tp_size * (2 if self.cp_size > 1 else 1)

    @property
    def scorers(self) -> int:
        """Ranks that score tokens of their own, on one pipeline stage, counting a tensor parallel group once."""
        return self.dp_size * self.cp_size

    def sum_over_samples(self, vector: torch.Tensor) -> torch.Tensor:
        """Adds what the last stage of every replica and context parallel rank contributed; in place, on all ranks.

        Ranks of the other stages must pass zeros.
        """
        if self.scorers > 1:
            dist.all_reduce(vector, group=_scorers())
        if self.pp_size > 1:
            dist.all_reduce(vector, group=parallel_state.get_pipeline_model_parallel_group())
        return vector

    def sum_by_name(self, sums: dict[str, torch.Tensor]) -> dict[str, list[float]]:
        """Adds up the last stages' vectors, all of one length, over the replicas; other stages pass nothing."""
        result: list[dict[str, list[float]]] = [{}]
        if self.is_last_stage:
            values = torch.stack([sums[name] for name in sorted(sums)])
            if self.scorers > 1:
                dist.all_reduce(values, group=_scorers())
            result = [dict(zip(sorted(sums), values.tolist(), strict=True))]
        if self.pp_size > 1:
            source = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast_object_list(result, source, group=parallel_state.get_pipeline_model_parallel_group())
        return dict(result[0])

    def from_last_stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Broadcasts the last pipeline stage's tensor to the stages before it; in place."""
        if self.pp_size > 1:
            source = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(tensor, source, group=parallel_state.get_pipeline_model_parallel_group())
        return tensor

    def any_expert_peer(self, value: bool, device: torch.device) -> bool:
        """`any_in_lock_step` where experts are spread over ranks; elsewhere a replica, all of whose ranks must agree on
        `value`, goes its own way.
        """
        if parallel_state.get_expert_tensor_and_model_parallel_group().size() == 1:
            return value
        return self.any_in_lock_step(value, device)

    def any_in_lock_step(self, value: bool, device: torch.device) -> bool:
        """Whether `value` holds on any rank that generates in lock-step with this one."""
        return _any(value, device, self.lock_step)

    def any_rank(self, value: bool, device: torch.device) -> bool:
        """Whether `value` holds on any rank."""
        return _any(value, device, dist.group.WORLD)

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """Those of the items that this replica works on.

        Context parallel ranks count as replicas here: each holds the whole model.
        """
        return items if self.scorers == 1 else items[_scorers().rank() :: self.scorers]

    def from_all_scorers(self, mine: Result) -> list[Result]:
        """What every replica has, in their order, on all ranks; the ranks of one replica must have the same.

        Context parallel ranks count as replicas, as they do in `share`.
        """
        everyone: list = [mine]
        if self.scorers > 1:
            everyone *= self.scorers
            dist.all_gather_object(everyone, mine, group=_scorers())
        return everyone

    def spread_over_ranks(self, items: Sequence[Item], work: Callable[[Sequence[Item]], list[Result]]) -> list[Result]:
        """One result per item, in order, on all ranks; each item is worked on by one rank, for all.

        Results go over the hosts' network: the devices' process groups may be suspended while an engine has the turn.
        """
        shares: list = [None] * self.world_size
        dist.all_gather_object(shares, work(items[self.rank :: self.world_size]), group=host_group())
        return [shares[i % self.world_size][i // self.world_size] for i in range(len(items))]


def _scorers() -> dist.ProcessGroup:
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def _any(value: bool, device: torch.device, group: dist.ProcessGroup | None) -> bool:
    flag = torch.tensor([value], dtype=torch.int32, device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    return bool(flag.item())


def _lock_step(timeout_seconds: int) -> dist.ProcessGroup:
    """The group `Topology.lock_step`. A replica and an expert group may overlap without one holding the other."""
    replica = parallel_state.get_model_parallel_group()
    experts = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    mine = {*dist.get_process_group_ranks(replica), *dist.get_process_group_ranks(experts)}
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    together: list[set[int]] = []
    for ranks in everyone:
        met = [other for other in together if ranks & other]
        together = [other for other in together if other not in met] + [ranks.union(*met)]
    group, _ = dist.new_subgroups_by_enumeration(
        [sorted(ranks) for ranks in together], timeout=timedelta(seconds=timeout_seconds)
    )
    return group


def make_groups(layout: LayoutConfig, seed: int, timeout_seconds: int = 1800, pretended: bool = False) -> None:
    """Makes Megatron's process groups, pretended ones among pretended ranks, and seeds its random number trackers."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=timeout_seconds / 60,
        create_gloo_process_groups=not pretended,
    )
    if not pretended:  # the one group that megatron-core 0.16.1 makes without the timeout it was given
        experts = parallel_state.get_expert_data_parallel_group_gloo()
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_seconds), experts)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def join_layout(layout: LayoutConfig, seed: int, timeout_seconds: int = 1800) -> Topology:
    """Makes the layout's process groups, see `make_groups`, and says where this process stands."""
    make_groups(layout, seed, timeout_seconds)
    return Topology(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tp_size=layout.tp,
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=layout.pp,
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=layout.cp,
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        interleaved=layout.vpp > 1,
        lock_step=_lock_step(timeout_seconds),
    )


def leave_layout() -> None:
    """Ends the process groups."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
