"""Process groups of the layout, and this process's rank in each: its part of the model and of the batch."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Self, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import distributed_c10d

from grpo_mega.config.schema import LayoutConfig
from grpo_mega.models.megatron.te_kernels import ROWS
from grpo_mega.platform.collectives import host_group

Item = TypeVar("Item")


@dataclass(frozen=True)
class Topology:
    """This process's ranks in the layout, and collectives over its groups.

    Attributes:
        rank: Global rank.
        world_size: Number of processes.
        tp_size: Number of tensor parallel ranks, which share each layer.
        pp_rank, pp_size: This rank's pipeline stage, and the number of stages.
        cp_rank, cp_size: This rank's part of every sequence (context parallelism), and the number of parts.
        dp_rank, dp_size: This rank's data parallel replica, and the number of replicas.
        replica_of_rank: The replica of every rank of the job.
        interleaved: Whether pipeline ranks hold several pieces of the model.
        fp8: Whether matrix products are in 8 bits.
        lock_step: Group of the ranks that generate in lock-step with this one: those of its replica, those that share
            experts with one of them, the replicas of these, and so on.
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
    replica_of_rank: list[int]
    interleaved: bool
    fp8: bool
    lock_step: dist.ProcessGroup

    @classmethod
    def of(cls, layout: LayoutConfig, replica_of_rank: list[int], lock_step: dist.ProcessGroup) -> Self:
        """The topology of this process; Megatron's process groups must exist."""
        return cls(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            tp_size=layout.tp,
            pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
            pp_size=layout.pp,
            cp_rank=parallel_state.get_context_parallel_rank(),
            cp_size=layout.cp,
            dp_rank=parallel_state.get_data_parallel_rank(),
            dp_size=parallel_state.get_data_parallel_world_size(),
            replica_of_rank=replica_of_rank,
            interleaved=layout.vpp > 1,
            fp8=layout.fp8,
            lock_step=lock_step,
        )

    @property
    def is_last_stage(self) -> bool:
        """Whether this process is on the last pipeline stage, which has the output layer."""
        return self.pp_rank == self.pp_size - 1

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files of which there is one per job."""
        return self.rank == 0

    @property
    def row_multiple(self) -> int:
        """Divisor of the number of a rank's packed rows.

        Rotary embeddings cut a context parallel rank's rows in half; 8 bits are for blocks of rows.
        """
        return self.tp_size * (2 if self.cp_size > 1 else 1) * (ROWS if self.fp8 else 1)

    @property
    def scorers(self) -> int:
        """Number of ranks of a pipeline stage that score different tokens: replicas times context parallel ranks."""
        return self.dp_size * self.cp_size

    @property
    def is_first_of_replica(self) -> bool:
        """Whether this is the lowest rank of its replica, which writes files of which there is one per replica."""
        return self.replica_of_rank.index(self.dp_rank) == self.rank

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """Group of the ranks with the same part of the model in all replicas, for CPU tensors; None with one."""
        return parallel_state.get_data_parallel_group_gloo() if self.dp_size > 1 else None

    def whole_in_replica(self, vector: torch.Tensor) -> torch.Tensor:
        """Sums a vector over the context parallel ranks of the replica's last stage; in place, on all its ranks.

        Ranks of the other stages must pass zeros.
        """
        if self.cp_size > 1:
            dist.all_reduce(vector, group=parallel_state.get_context_parallel_group())
        if self.pp_size > 1:
            dist.all_reduce(vector, group=parallel_state.get_pipeline_model_parallel_group())
        return vector

    def from_first_of_replica(self, vector: torch.Tensor) -> torch.Tensor:
        """Broadcasts a CPU vector of the replica's lowest rank to all ranks of the replica; the others pass zeros."""
        device = torch.device("cuda") if torch.cuda.is_available() else vector.device
        # These groups communicate through NCCL on a GPU, which takes no CPU tensors. The sum of one vector and zeros
        # broadcasts that vector.
        spread = vector.to(device)
        for group in (
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_context_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
        ):
            dist.all_reduce(spread, group=group)
        return spread.cpu()

    def of_every_replica(self, numbers: Sequence[int]) -> list[list[int]]:
        """Gathers equally many integers of each replica, by replica; all ranks of a replica pass the same ones."""
        if self.replicas is None:
            return [[*numbers]]
        local = torch.tensor(numbers, dtype=torch.int64)
        gathered = [torch.empty_like(local) for _ in range(self.dp_size)]
        dist.all_gather(gathered, local, group=self.replicas)
        return [of_replica.tolist() for of_replica in gathered]

    def sum_by_name(self, sums: dict[str, torch.Tensor]) -> dict[str, list[float]]:
        """Sums vectors of the last stages, all of one length, over the replicas; other stages pass {}."""
        result: list[dict[str, list[float]]] = [{}]
        if self.is_last_stage:
            # Sorted, so that all ranks add up the same rows, in whatever order each has met the names.
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
        """`any_in_lock_step` if experts are split over ranks; otherwise `value`, which all ranks of a replica share."""
        if parallel_state.get_expert_tensor_and_model_parallel_group().size() == 1:
            return value
        return self.any_in_lock_step(value, device)

    def any_in_lock_step(self, value: bool, device: torch.device) -> bool:
        """Whether `value` holds on any rank that generates in lock-step with this one."""
        return _any(value, device, self.lock_step)

    def any_rank(self, value: bool, device: torch.device) -> bool:
        """Whether `value` holds on any rank."""
        return _any(value, device, dist.group.WORLD)

    def sum_over_ranks(self, values: Sequence[int], device: torch.device) -> list[int]:
        """Sum of each value over all ranks, on all ranks."""
        sums = torch.tensor(values, dtype=torch.int64, device=device)
        dist.all_reduce(sums)
        return sums.tolist()

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """Items of this replica: every n-th.

        Context parallel ranks count as replicas here: each holds the whole model.
        """
        return items if self.scorers == 1 else items[_scorers().rank() :: self.scorers]

    @property
    def model_parallel_rank_and_size(self) -> tuple[int, int]:
        """This rank's index among the tensor and pipeline parallel ranks of one copy of the model, and their number."""
        group = parallel_state.get_model_parallel_group()
        return group.rank(), group.size()


def _scorers() -> dist.ProcessGroup:
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def _any(value: bool, device: torch.device, group: dist.ProcessGroup | None) -> bool:
    flag = torch.tensor([value], dtype=torch.int32, device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    return bool(flag.item())


def _lock_step(timeout_seconds: int) -> dist.ProcessGroup:
    """The group `Topology.lock_step`. A replica and an expert group may overlap without one containing the other."""
    replica = parallel_state.get_model_parallel_group()
    experts = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    local = {*dist.get_process_group_ranks(replica), *dist.get_process_group_ranks(experts)}
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, local)
    components: list[set[int]] = []
    for ranks in gathered:
        # Connected components: a set that overlaps several earlier ones joins them. All ranks go through the same sets
        # in the same order, as each must create the same groups in the same order.
        overlapping = [other for other in components if ranks & other]
        components = [other for other in components if other not in overlapping] + [ranks.union(*overlapping)]
    group, _ = dist.new_subgroups_by_enumeration(
        [sorted(ranks) for ranks in components], timeout=timedelta(seconds=timeout_seconds)
    )
    return group


def make_groups(layout: LayoutConfig, seed: int, timeout_seconds: int = 1800, pretended: bool = False) -> None:
    """Creates Megatron's process groups, and seeds its random number trackers.

    With `pretended` the job has torch's fake process group, as in the planner, and no gloo groups are created.
    """
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
    if not pretended:
        # megatron-core 0.16.1 creates this one group without the given timeout.
        experts = parallel_state.get_expert_data_parallel_group_gloo()
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_seconds), experts)
    # Megatron's layers draw initial values, which are overwritten later, and fail without seeded trackers.
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def join_layout(layout: LayoutConfig, seed: int, timeout_seconds: int = 1800) -> Topology:
    """Creates the layout's process groups, see `make_groups`; returns this process's `Topology`."""
    make_groups(layout, seed, timeout_seconds)
    replica_of_rank: list = [None] * dist.get_world_size()
    dist.all_gather_object(replica_of_rank, parallel_state.get_data_parallel_rank())
    return Topology.of(layout, replica_of_rank, _lock_step(timeout_seconds))


def leave_layout() -> None:
    """Destroys all process groups, at the end of the job."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def leave_groups() -> None:
    """Destroys the layout's process groups, so that the job can join another layout; every rank must call it.

    Models that were built in the layout must be unreachable, or their groups keep their threads.
    """
    dist.barrier()
    # Megatron only forgets its groups, and torch has no public list of them. The world and the hosts' group stay: they
    # are the job's, not the layout's.
    parallel_state.destroy_model_parallel()
    for group in [*distributed_c10d._world.pg_map]:
        if group not in (dist.group.WORLD, host_group()):
            dist.destroy_process_group(group)
    # Reference cycles keep destroyed groups and their threads alive, and Python may not collect for many layouts.
    gc.collect()
