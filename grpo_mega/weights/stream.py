"""The policy's weights as whole Hugging Face tensors on every rank, a bucket at a time, never the whole model.

Who holds which part of a tensor follows from Megatron's sharding metadata, so tensor, pipeline and expert parallelism,
fused and duplicated parameters are one case: every part travels from one rank that holds it. Replicas keep to
themselves: parts of routed experts travel within one set of experts, all others within one model parallel group.

What arrives has the policy's adapters in it (`merging.py`); the model's own weights stay as they are.

Memory: a bucket, and the parts of it that one rank sends; when each rank gets experts of its own, the parts of the
buckets of all ranks of the group. A caller that keeps all buckets holds the whole model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from grpo_mega.models.policy import Policy
from grpo_mega.models.shards import Box
from grpo_mega.weights.merging import Parts, parts_of
from grpo_mega.weights.names import Entry, Slices, entries, size
from grpo_mega.weights.peft import adapter_entries

Bucket = list[tuple[str, torch.Tensor]]
FILE_BYTES = 4 * 2**30
"""Most bytes of a file of an exported model, which is a bucket."""


@dataclass
class Traffic:
    """What streams moved, added up: whole tensors handed out here, and what came from and went to other ranks.

    A broadcast counts once for its sender.
    """

    tensors: int = 0
    bytes: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0


@torch.no_grad()
def hf_buckets(
    policy: Policy,
    byte_budget: int,
    experts_of: range | None = None,
    traffic: Traffic | None = None,
    adapters: bool = False,
) -> Iterator[Bucket]:
    """Yields (name, whole tensor) pairs of at most `byte_budget` bytes together; every rank must take all of them.

    A tensor that is larger by itself makes a bucket of its own; so do several that go together (`Entry`). Each tensor
    comes once, in the same order and with the same bits on every rank, in the dtype that it is trained in and in memory
    that the caller may keep. Routed experts come last. Every rank gets equally many buckets; the last of a rank that
    asked for fewer experts are empty.

    Args:
        policy: The model.
        byte_budget: Most bytes of a bucket.
        experts_of: Of the routed experts only these, such as those that this rank's engine owns. Every rank may name
            others, and an expert travels to those ranks only that named it. None for all of them.
        traffic: What is moved is added here.
        adapters: Yields the adapters, called as `peft` calls them, instead of weights that have them in.

    Raises:
        ValueError: No Hugging Face model describes this one, a rank named experts that do not exist, or some of those
            that are one tensor, or byte_budget is not above 0 and the same everywhere.
    """
    traffic = Traffic() if traffic is None else traffic
    asked = _asked(byte_budget, experts_of, policy.architecture.moe.experts)
    wanted = entries(policy.architecture, policy.vocab_size)
    if {*asked} != {None} and any(entry.place for entry in wanted):
        raise ValueError(f"experts_of={experts_of}: a tensor of this family holds all experts; take all of them")
    parts, device = parts_of(policy, wanted), policy.platform.device
    if adapters:
        assert policy.lora, "a policy without adapters"
        wanted = adapter_entries(wanted, policy.lora, policy.architecture.layers)
    replica = _Sharing(parallel_state.get_model_parallel_group(), parts, wanted, device, traffic, routed=False)
    for bucket in plan(replica.entries, byte_budget):
        yield replica.give_to_all(bucket)
    group = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    experts = _Sharing(group, parts, wanted, device, traffic, routed=True)
    plans = {numbers: [*plan(_of(experts.entries, numbers), byte_budget)] for numbers in {*asked}}
    for buckets in zip_longest(*(plans[numbers] for numbers in asked), fillvalue=[]):
        if {*asked} == {None}:
            yield experts.give_to_all(buckets[0])
        else:
            yield experts.give_each([buckets[rank] for rank in dist.get_process_group_ranks(group)])


def plan(wanted: Iterable[Entry], byte_budget: int) -> Iterator[list[Entry]]:
    """Cuts tensors, in their order, into buckets of at most `byte_budget` bytes, or of what cannot be cut."""
    bucket: list[Entry] = []
    room = byte_budget
    for part in _inseparable(wanted):
        size = sum(entry.bytes for entry in part)
        if bucket and size > room:
            yield bucket
            bucket, room = [], byte_budget
        bucket += part
        room -= size
    if bucket:
        yield bucket


def _inseparable(wanted: Iterable[Entry]) -> Iterator[list[Entry]]:
    """One tensor each, or those that go together."""
    part: list[Entry] = []
    for entry in wanted:
        if part and not entry.joins_last:
            yield part
            part = []
        part.append(entry)
    if part:
        yield part


def _asked(byte_budget: int, experts_of: range | None, experts: int) -> list[range | None]:
    """The `experts_of` of every rank of the job; wrong arguments of one rank are an error on all of them."""
    asked: list = [None] * dist.get_world_size()
    dist.all_gather_object(asked, (byte_budget, experts_of))
    for rank, (budget, numbers) in enumerate(asked):
        if budget <= 0 or budget != byte_budget:
            raise ValueError(f"byte_budget={budget} on rank {rank}; choose the same number above 0 on all ranks")
        if numbers and not {*numbers} <= {*range(experts)}:
            raise ValueError(f"experts_of={numbers} on rank {rank}, but the model has {experts} experts")
    return [numbers for _, numbers in asked]


def _of(routed: list[Entry], numbers: range | None) -> list[Entry]:
    """The entries of these experts; all of them when `numbers` is None."""
    return [entry for entry in routed if numbers is None or entry.expert in numbers]


@dataclass(frozen=True)
class _Piece:
    """What a shard contributes to a tensor: `source` of the shard is `target` of the tensor; who sends it."""

    entry: Entry
    box: Box
    source: Slices
    target: Slices
    holder: int

    @property
    def shape(self) -> torch.Size:
        return size(self.target)


class _Sharing:
    """Some of the tensors, and a group of ranks that has all parts of them; ranks are those within the group."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        parts: Parts,
        wanted: list[Entry],
        device: torch.device,
        traffic: Traffic,
        routed: bool,
    ) -> None:
        self.entries = [entry for entry in wanted if (entry.expert is not None) == routed]
        self._group, self._me, self._parts = group, group.rank(), parts
        self._device, self._traffic = device, traffic
        self._holder: dict[str, dict[Box, int]] = {entry.key: {} for entry in self.entries}
        everyone: list = [None] * group.size()
        mine = [(key, box) for key in parts.held.keys() & self._holder.keys() for box in parts.held[key]]
        dist.all_gather_object(everyone, mine, group=group)
        for rank, of_rank in enumerate(everyone):
            for key, box in of_rank:
                self._holder[key].setdefault(box, rank)  # the first of several replicas

    def give_to_all(self, bucket: list[Entry]) -> Bucket:
        """A bucket on every rank: each broadcasts the parts that it is to send, one message per dtype."""
        whole = self._empty(bucket)
        messages: dict[tuple[int, torch.dtype], list[_Piece]] = defaultdict(list)
        for piece in self._pieces(bucket):
            messages[piece.holder, piece.entry.dtype].append(piece)
        for (sender, dtype), pieces in messages.items():
            mine = sender == self._me
            message = self._packed(pieces, dtype) if mine else self._space(pieces, dtype)
            dist.broadcast(message, dist.get_global_rank(self._group, sender), group=self._group)
            self._unpack(message, pieces, whole)
            self._count(received=0 if mine else message.nbytes, sent=message.nbytes if mine else 0)
        return self._handed_out(whole)

    def give_each(self, buckets: Sequence[list[Entry]]) -> Bucket:
        """A bucket of its own for every rank, in one exchange; parts that a rank has itself do not travel."""
        ranks, me, dtype = range(len(buckets)), self._me, self.entries[0].dtype
        wanted = [[*self._pieces(bucket)] for bucket in buckets]
        there = [[p for p in wanted[rank] if p.holder == me] for rank in ranks]
        here = [[p for p in wanted[me] if p.holder == rank] for rank in ranks]
        outgoing, incoming = self._packed(chain(*there), dtype), self._space(chain(*here), dtype)
        sizes_here, sizes_there = ([sum(p.shape.numel() for p in pieces) for pieces in x] for x in (here, there))
        dist.all_to_all_single(incoming, outgoing, sizes_here, sizes_there, group=self._group)
        whole = self._empty(buckets[me])
        self._unpack(incoming, chain(*here), whole)
        kept = sizes_here[me]
        self._count((len(incoming) - kept) * dtype.itemsize, (len(outgoing) - kept) * dtype.itemsize)
        return self._handed_out(whole)

    def _pieces(self, bucket: list[Entry]) -> Iterator[_Piece]:
        """All parts of these tensors, in the same order on every rank.

        Raises:
            RuntimeError: The group does not hold all of a tensor.
        """
        for entry in bucket:
            pieces = [
                _Piece(entry, box, source, target, holder)
                for box, holder in self._holder[entry.key].items()
                for source, target in entry.overlap(box)
            ]
            if sum(piece.shape.numel() for piece in pieces) != entry.numel:
                raise RuntimeError(f"the ranks {dist.get_process_group_ranks(self._group)} do not hold {entry} once")
            yield from pieces

    def _packed(self, pieces: Iterable[_Piece], dtype: torch.dtype) -> torch.Tensor:
        parts = [p.entry.outwards(self._parts.merged(p.entry, p.box, p.source)).flatten() for p in pieces]
        return torch.cat(parts) if parts else self._space([], dtype)

    def _space(self, pieces: Iterable[_Piece], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(sum(p.shape.numel() for p in pieces), dtype=dtype, device=self._device)

    def _empty(self, bucket: list[Entry]) -> dict[str, torch.Tensor]:
        described = {e.name: (e.shape, e.dtype) for e in bucket}  # several entries may be parts of one tensor
        return {name: torch.empty(*x[0], dtype=x[1], device=self._device) for name, x in described.items()}

    def _unpack(self, message: torch.Tensor, pieces: Iterable[_Piece], whole: dict[str, torch.Tensor]) -> None:
        pieces = [*pieces]
        for piece, part in zip(pieces, message.split([p.shape.numel() for p in pieces]), strict=True):
            whole[piece.entry.name][piece.target] = part.view(piece.shape)

    def _count(self, received: int, sent: int) -> None:
        self._traffic.received_bytes += received
        self._traffic.sent_bytes += sent

    def _handed_out(self, whole: dict[str, torch.Tensor]) -> Bucket:
        self._traffic.tensors += len(whole)
        self._traffic.bytes += sum(tensor.nbytes for tensor in whole.values())
        return [*whole.items()]
