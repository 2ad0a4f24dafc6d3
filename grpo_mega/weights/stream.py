"""Stream of the policy's weights as whole Hugging Face tensors to every rank, in buckets, never the whole model.

The owners of a tensor's shards follow from Megatron's sharding metadata, so tensor, pipeline and expert parallelism,
fused and duplicated parameters are one case: every shard is sent by one rank that holds it. Replicas do not
communicate: shards of routed experts are sent within one set of experts, all others within one model parallel group.

The streamed tensors have the policy's adapters merged in (`merging.py`); the model's own weights are unchanged.

Memory: a bucket, and the shards of it that one rank sends; when each rank gets its own experts, the shards of the
buckets of all ranks of the group. A bucket stays in memory until its caller drops the last reference (`del` in the
loop).
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
from grpo_mega.weights.names import NamedTensor, Region, entries, size
from grpo_mega.weights.peft import adapter_entries

Bucket = list[tuple[str, torch.Tensor]]
FILE_BYTES = 4 * 2**30
"""Size limit of one file of an exported model, in bytes; each file is one bucket."""


@dataclass
class Traffic:
    """Total traffic of streams: bytes of whole tensors yielded here, and bytes received from and sent to other ranks.

    A broadcast counts once for its sender.
    """

    tensors: int = 0
    bytes: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0


def hf_buckets(
    policy: Policy,
    byte_budget: int,
    experts_of: range | None = None,
    traffic: Traffic | None = None,
    adapters: bool = False,
) -> Iterator[Bucket]:
    """Yields buckets of (name, whole tensor) pairs of at most `byte_budget` bytes; every rank must consume all.

    A larger tensor fills one bucket alone; so do several that belong together (`NamedTensor`). Each tensor comes once,
    in the same order and bit for bit equal on every rank, in its dtype of training and in memory that the caller may
    keep. Routed experts come last. Every rank gets the same number of buckets; the last ones of a rank that asked for
    fewer experts are empty.

    Args:
        policy: The model.
        byte_budget: Largest size of a bucket in bytes.
        experts_of: Only these routed experts, such as those of this rank's engine rank. Ranks may name different
            experts, and an expert is sent only to ranks that named it. None for all.
        traffic: Counter that the traffic is added to.
        adapters: Yields the adapters, under `peft`'s names, instead of merged weights.

    Raises:
        InputError: The model has no Hugging Face equivalent.
        ValueError: A rank named experts that do not exist, or only some of the experts in one tensor, or byte_budget is
            not positive and equal on all ranks.
    """
    traffic = Traffic() if traffic is None else traffic
    # Every check that could fail on one rank alone is done on the arguments of all ranks before the first broadcast, so
    # that all ranks raise together.
    asked = _asked(byte_budget, experts_of, policy.architecture.moe.experts)
    wanted = entries(policy.architecture, policy.vocab_size)
    if {*asked} != {None} and any(entry.place for entry in wanted):
        raise ValueError(f"experts_of={experts_of}: a tensor of this family holds all experts; take all of them")
    parts, device = parts_of(policy, wanted), policy.platform.device
    if adapters:
        assert policy.lora, "a policy without adapters"
        wanted = adapter_entries(wanted, policy.lora, policy.architecture.layers)
    # First what every rank needs: everything but the routed experts, within one model parallel group.
    replica = _Sharing(parallel_state.get_model_parallel_group(), parts, wanted, device, traffic, routed=False)
    for bucket in plan(replica.entries, byte_budget):
        yield replica.give_to_all(bucket)
    # Then the routed experts. All ranks walk through the plans of all ranks in step, because each round is one
    # collective of the group; a rank whose plan is shorter takes part with an empty bucket.
    group = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    experts = _Sharing(group, parts, wanted, device, traffic, routed=True)
    plans = {}
    for numbers in {*asked}:
        of_rank = [entry for entry in experts.entries if numbers is None or entry.expert in numbers]
        plans[numbers] = [*plan(of_rank, byte_budget)]
    for buckets in zip_longest(*(plans[numbers] for numbers in asked), fillvalue=[]):
        if {*asked} == {None}:
            yield experts.give_to_all(buckets[0])
        else:
            yield experts.give_each([buckets[rank] for rank in dist.get_process_group_ranks(group)])


def plan(wanted: Iterable[NamedTensor], byte_budget: int) -> Iterator[list[NamedTensor]]:
    """Groups tensors, in order, into buckets of at most `byte_budget` bytes, or of one inseparable group."""
    bucket: list[NamedTensor] = []
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


def _inseparable(wanted: Iterable[NamedTensor]) -> Iterator[list[NamedTensor]]:
    """Yields single tensors, or groups of tensors that belong together."""
    part: list[NamedTensor] = []
    for entry in wanted:
        if part and not entry.joins_last:
            yield part
            part = []
        part.append(entry)
    if part:
        yield part


def _asked(byte_budget: int, experts_of: range | None, experts: int) -> list[range | None]:
    """The `experts_of` of every rank of the job; invalid arguments on one rank are an error on all."""
    # Exchanged over the whole job rather than the group: ranks of other replicas must raise as well.
    asked: list = [None] * dist.get_world_size()
    dist.all_gather_object(asked, (byte_budget, experts_of))
    for rank, (budget, numbers) in enumerate(asked):
        if budget <= 0 or budget != byte_budget:
            raise ValueError(f"byte_budget={budget} on rank {rank}; choose the same number above 0 on all ranks")
        if numbers and not {*numbers} <= {*range(experts)}:
            raise ValueError(f"experts_of={numbers} on rank {rank}, but the model has {experts} experts")
    return [numbers for _, numbers in asked]


@dataclass(frozen=True)
class _Piece:
    """A shard's contribution to a tensor: slice `source` of the shard is slice `target` of the tensor."""

    entry: NamedTensor
    box: Box
    source: Region
    target: Region
    holder: int

    @property
    def shape(self) -> torch.Size:
        return size(self.target)


class _Sharing:
    """Some of the tensors, and a group of ranks that holds all their shards; ranks are numbered within the group."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        parts: Parts,
        wanted: list[NamedTensor],
        device: torch.device,
        traffic: Traffic,
        routed: bool,
    ) -> None:
        self.entries = [entry for entry in wanted if (entry.expert is not None) == routed]
        self._group, self._me, self._parts = group, group.rank(), parts
        self._device, self._traffic = device, traffic
        # Who holds which shard is exchanged once; afterwards every rank derives the same messages in the same order
        # from it, and no further metadata is sent.
        self._holder: dict[str, dict[Box, int]] = {entry.key: {} for entry in self.entries}
        everyone: list = [None] * group.size()
        mine = [(key, box) for key in parts.held.keys() & self._holder.keys() for box in parts.held[key]]
        dist.all_gather_object(everyone, mine, group=group)
        for rank, of_rank in enumerate(everyone):
            for key, box in of_rank:
                # Of several ranks with a copy of a shard, the first one sends it; the choice must be the same on every
                # rank.
                self._holder[key].setdefault(box, rank)

    # On the methods and not on `hf_buckets`: around a generator, the decorator would keep a reference to each bucket
    # until the next one is made.
    @torch.no_grad()
    def give_to_all(self, bucket: list[NamedTensor]) -> Bucket:
        """A bucket on every rank: each rank broadcasts the shards that it is to send, one message per dtype."""
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
            # Freed before the next message is allocated.
            del message
        return self._handed_out(whole)

    @torch.no_grad()
    def give_each(self, buckets: Sequence[list[NamedTensor]]) -> Bucket:
        """A different bucket for every rank, in one exchange; shards that a rank holds itself are not sent."""
        # One dtype is enough: routed experts are all in the model's dtype (only the router's bias, which is not routed,
        # is not).
        ranks, me, dtype = range(len(buckets)), self._me, self.entries[0].dtype
        wanted = [[*self._pieces(bucket)] for bucket in buckets]
        there = [[p for p in wanted[rank] if p.holder == me] for rank in ranks]
        here = [[p for p in wanted[me] if p.holder == rank] for rank in ranks]
        outgoing, incoming = self._packed(chain(*there), dtype), self._space(chain(*here), dtype)
        # Counts of elements, not bytes, in the order of ranks. Both sides derive them from the same table, so they
        # match.
        sizes_here, sizes_there = ([sum(p.shape.numel() for p in pieces) for pieces in x] for x in (here, there))
        dist.all_to_all_single(incoming, outgoing, sizes_here, sizes_there, group=self._group)
        whole = self._empty(buckets[me])
        self._unpack(incoming, chain(*here), whole)
        kept = sizes_here[me]
        self._count((len(incoming) - kept) * dtype.itemsize, (len(outgoing) - kept) * dtype.itemsize)
        return self._handed_out(whole)

    def _pieces(self, bucket: list[NamedTensor]) -> Iterator[_Piece]:
        """Yields all shards of these tensors, in the same order on every rank.

        Raises:
            RuntimeError: The group lacks a part of a tensor.
        """
        for entry in bucket:
            pieces = [
                _Piece(entry, box, source, target, holder)
                for box, holder in self._holder[entry.key].items()
                for source, target in entry.overlap(box)
            ]
            # Pieces must cover the tensor exactly once. A gap would send uninitialised memory to an engine, with no
            # error anywhere.
            if sum(piece.shape.numel() for piece in pieces) != entry.numel:
                raise RuntimeError(f"the ranks {dist.get_process_group_ranks(self._group)} do not hold {entry} once")
            yield from pieces

    def _packed(self, pieces: Iterable[_Piece], dtype: torch.dtype) -> torch.Tensor:
        parts = [p.entry.outwards(self._parts.merged(p.entry, p.box, p.source)).flatten() for p in pieces]
        return torch.cat(parts) if parts else self._space([], dtype)

    def _space(self, pieces: Iterable[_Piece], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(sum(p.shape.numel() for p in pieces), dtype=dtype, device=self._device)

    def _empty(self, bucket: list[NamedTensor]) -> dict[str, torch.Tensor]:
        # Several entries may be parts of one tensor (GPT-OSS's experts): it is allocated once.
        described = {e.name: (e.shape, e.dtype) for e in bucket}
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
