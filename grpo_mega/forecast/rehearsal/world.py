"""Fake process groups for absent ranks: collectives are counted, and nothing is sent."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.futures import Future
from torch.testing._internal.distributed.fake_pg import FakeStore  # torch has no public one

from grpo_mega.config.schema import LayoutConfig
from grpo_mega.models.topology import Topology, make_groups

NAME = "null"
# As large as the copies that the null GPU makes (COPIED in nullgpu/runtime.cpp): device memory is address space alone,
# and larger messages would fill the host.
SMALL = 1 << 20
"""Largest message, in bytes, that absent ranks answer: sizes, flags, objects."""

calls: Counter[tuple[str, str]] = Counter()
"""(group, collective) -> number of calls."""
sent: Counter[tuple[str, str]] = Counter()
"""(group, collective) -> bytes."""


def taken() -> list[dict[str, Any]]:
    """Collectives since the last call, most bytes first."""
    rows = [
        {"group": group, "collective": kind, "calls": calls[group, kind], "bytes": size}
        for (group, kind), size in sent.most_common()
    ]
    calls.clear()
    sent.clear()
    return rows


class NullGroup(dist.ProcessGroup):
    """A process group of which only this rank exists.

    Absent ranks send small messages, equal to this rank's; of larger ones nothing arrives, and memory stays unchanged.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._members = size

    def getBackendName(self) -> str:
        """Its name among torch's backends."""
        return NAME

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """Counted; memory stays unchanged."""
        return self._done("all-reduce", tensors, tensors)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """Counted; memory stays unchanged."""
        return self._done("all-reduce", tensors, tensors)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """Counted; memory stays unchanged, whoever sends."""
        return self._done("broadcast", tensors, tensors)

    def allgather(  # type: ignore[override]
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        """Counted; every rank's part is a copy of this one's."""
        for others, mine in zip(outputs, inputs, strict=True):
            for other in others:
                _say(other, mine)
        return self._done("all-gather", [t for others in outputs for t in others], outputs)

    def _allgather_base(self, output: torch.Tensor, mine: torch.Tensor, opts: Any = None) -> Any:
        for other in output.view(-1).chunk(self._members):
            _say(other, mine)
        return self._done("all-gather", [output], output)

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        """Counted."""
        return self._done("all-gather", outputs, outputs)

    def reduce_scatter(  # type: ignore[override]
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> Any:
        """Counted."""
        return self._done("reduce-scatter", [t for parts in inputs for t in parts], outputs)

    def _reduce_scatter_base(self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None) -> Any:
        return self._done("reduce-scatter", [whole], output)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        """Counted."""
        return self._done("reduce-scatter", inputs, outputs)

    def alltoall_base(
        self, output: torch.Tensor, mine: torch.Tensor, coming: list[int], going: list[int], opts: Any = None
    ) -> Any:
        """Counted."""
        return self._done("all-to-all", [mine], output)

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        """Counted."""
        return self._done("all-to-all", inputs, outputs)

    def send(self, tensors: list[torch.Tensor], *_: Any) -> Any:
        """Counted."""
        return self._done("send", tensors, tensors)

    def recv(self, tensors: list[torch.Tensor], *_: Any) -> Any:
        """Counted; nothing arrives."""
        return self._done("receive", tensors, tensors)

    def barrier(self, opts: Any = None) -> Any:
        """Counted; returns at once."""
        return self._done("barrier", [], None)

    def _get_backend(self, device: torch.device) -> Any:
        # torch 2.14 asks the backend whether messages between stages can be sent together: without coalescing, no.
        return self

    def _start_coalescing(self, device: torch.device) -> None:
        """Does nothing: each collective up to `_end_coalescing` is counted alone."""

    def _end_coalescing(self, device: torch.device) -> Any:
        return self._finished(None)

    def _done(self, kind: str, moved: Sequence[torch.Tensor], result: Any) -> Any:
        group = self.group_desc if self.group_desc not in ("", "undefined") else self.group_name
        calls[group, kind] += 1
        sent[group, kind] += sum(tensor.nbytes for tensor in moved)
        return self._finished(result)

    def _finished(self, result: Any) -> Any:
        future: Future = Future()
        future.set_result(result)
        return _create_work_from_future(future)


SINCE_2_14 = {
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}
"""Names of a group's methods -> what torch 2.14 calls them."""
# Both names stay, since rehearsals run with either torch.
for _name, _newer in SINCE_2_14.items():
    setattr(NullGroup, _newer, getattr(NullGroup, _name))


def _say(other: torch.Tensor, mine: torch.Tensor) -> None:
    """Copies this rank's part to another one's, as bytes, since the null GPU's memory is the host's."""
    # Not torch's copy, which would count as a copy of the job, and which the null GPU makes up to 4 KiB only. In an
    # all-gather in place, this rank's part is in the output already.
    if mine.nbytes <= SMALL and other.nbytes == mine.nbytes and other.data_ptr() != mine.data_ptr():
        ctypes.memmove(other.data_ptr(), mine.contiguous().data_ptr(), mine.nbytes)


@dataclass(frozen=True)
class AloneInWorld(Topology):
    """A rank's place in a layout whose other ranks are absent: they would send the same as this one."""

    def of_every_replica(self, numbers: Sequence[int]) -> list[list[int]]:
        """This replica's integers, as often as there are replicas."""
        return [[*numbers]] * self.dp_size

    def sum_by_name(self, sums: dict[str, torch.Tensor]) -> dict[str, list[float]]:
        """This rank's own sums; a stage without the loss has none."""
        # The sum over replicas is made, so that it is counted as in a job. Stages without the loss would get it by a
        # broadcast of objects from the last stage, which is absent: they go on with made-up sums.
        if self.is_last_stage:
            values = torch.stack([sums[name] for name in sorted(sums)])
            if self.scorers > 1:
                dist.all_reduce(values, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
            return dict(zip(sorted(sums), values.tolist(), strict=True))
        return {"loss": [0.0, 1.0]}


def join_alone(layout: LayoutConfig, rank: int, world_size: int, seed: int) -> Topology:
    """Makes this process rank `rank` of `world_size`, and creates Megatron's process groups."""
    dist.Backend.register_backend(NAME, lambda _, rank, size, __: NullGroup(rank, size), devices=["cpu", "cuda"])
    dist.init_process_group(NAME, rank=rank, world_size=world_size, store=FakeStore())
    new_group = dist.new_group

    def null_group(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **kwargs | {"backend": NAME})

    # Also groups that ask for gloo, which would wait for the absent ranks.
    dist.new_group = null_group
    make_groups(layout, seed)
    alone = [parallel_state.get_data_parallel_rank()] * world_size
    return AloneInWorld.of(layout, alone, parallel_state.get_model_parallel_group())
