"""Cuts a replica's batch into packed micro-batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist
import torch.nn.functional as F

from grpo_mega.models.megatron.packed import PackedTokens
from grpo_mega.models.schedule import cells_per_token, deal, fill
from grpo_mega.models.topology import Topology
from grpo_mega.models.transfer import moved
from grpo_mega.types import Batch, ScoredTokens


@dataclass(frozen=True)
class Predicted:
    """The scored tokens that a multi-token prediction module predicts; those too near the beginning are left out.

    Attributes:
        rows: [m] rows of T' whose state predicts the tokens.
        tokens: [m] the tokens.
    """

    rows: torch.Tensor
    tokens: torch.Tensor


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass on one rank.

    Attributes:
        tokens: [1, T'] packed sequences and padding; with context parallelism this rank's rows of them.
        packed: How the tokens split into sequences, each piece of a sample being one.
        rows: [n] rows of T' whose hidden state scores a token: the row that predicts it, or its own.
        scored: The scored tokens; `index` is their index in the replica's batch.
        ahead: For each depth of multi-token prediction the tokens that its module predicts.
    """

    tokens: torch.Tensor
    packed: PackedTokens
    rows: torch.Tensor
    scored: ScoredTokens
    ahead: list[Predicted]


@dataclass(frozen=True)
class Totals:
    """The size of a batch, over all replicas.

    Attributes:
        sequences: Number of sequences, each piece counted.
        tokens: Number of tokens.
        scored: Number of tokens that are scored.
    """

    sequences: int
    tokens: int
    scored: int


@dataclass(frozen=True)
class MicroBatches:
    """A replica's micro-batches of its batch. Their number is known; each is made when it is needed, and not kept.

    A pass over a whole step can have hundreds of them, which together would fill a GPU.

    Attributes:
        batch: The replica's batch in pieces, see `Batch.in_pieces`.
        plan: Indices of the pieces in each micro-batch, all those of a sample in one; some micro-batches may be empty.
        totals: Size of the global batch.
        topology, device: Topology and device of the process that computes them.
        depths: How many tokens ahead multi-token prediction reads.
        own_state: Whether a scored token is scored by its own hidden state, not by the one that predicts it.
        padded: Whether attention is computed in a table.
    """

    batch: Batch
    plan: list[list[int]]
    totals: Totals
    topology: Topology
    device: torch.device
    depths: int
    own_state: bool
    padded: bool

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[MicroBatch]:
        for sequences in self.plan:
            yield self._made(sequences)

    def readers(self, count: int) -> list[Iterator[MicroBatch]]:
        """`count` iterators over the same objects, one for each of a rank's interleaved pieces of the model.

        A micro-batch is released when the last reader has it. (`itertools.tee` would keep dozens of them.)
        """
        made, queues = iter(self), [deque[MicroBatch]() for _ in range(count)]

        def read(queue: deque[MicroBatch]) -> Iterator[MicroBatch]:
            for _ in self.plan:
                if not queue:
                    following = next(made)
                    for each in queues:
                        each.append(following)
                    # Otherwise this frame, which waits at the `yield`, would keep the micro-batch alive.
                    del following
                yield queue.popleft()

        return [read(queue) for queue in queues]

    def rows(self, sequences: list[int]) -> int:
        """T, the number of packed rows of the micro-batch of these sequences, over all context parallel ranks."""
        batch, chosen = self.batch, torch.tensor(sequences, dtype=torch.int64)
        lengths, shared = batch.lengths[chosen], batch.prompt_lengths[chosen]
        prompts = batch.prompts[chosen].tolist()
        is_again = torch.tensor([prompt in prompts[:i] for i, prompt in enumerate(prompts)], dtype=torch.bool)
        tokens = int(lengths.sum() - shared.minimum(lengths)[is_again].sum())
        return max(-(-tokens // self._multiple), 1) * self._multiple

    @property
    def _multiple(self) -> int:
        return self.topology.row_multiple * self.topology.cp_size

    def _made(self, sequences: list[int]) -> MicroBatch:
        micro = _micro_batch(self, sequences)
        # Later stages have allocated memory for this number of rows.
        assert micro.packed.total == self.rows(sequences), (micro.packed.total, sequences)
        micro.packed.batch_sequences, micro.packed.batch_tokens = self.totals.sequences, self.totals.tokens
        micro.packed.loss_scale = len(self) * self.topology.dp_size
        return micro


def share(batch: Batch, topology: Topology, budget: int, padded: bool = True) -> Batch:
    """This replica's sequences of a global batch that every rank has: for small batches."""
    lengths, prompts, shared = batch.lengths.tolist(), batch.prompts.tolist(), batch.prompt_lengths.tolist()
    cells, pieces = cells_per_token(topology.cp_size, padded), batch.pieces.tolist()
    shares = deal(lengths, prompts, shared, topology.dp_size, budget, cells, pieces)
    return batch if topology.dp_size == 1 else batch.select(shares[topology.dp_rank])


def gathered(vector: torch.Tensor, batch: Batch, topology: Topology) -> torch.Tensor:
    """[T] vector of the replica's batch -> that of the global batch, on every rank: undoes `share`, for comparisons."""
    parts: list = [dict(zip(batch.numbers.tolist(), vector.split(batch.lengths.tolist()), strict=True))]
    if topology.replicas is not None:
        parts *= topology.dp_size
        dist.all_gather_object(parts, parts[0], group=topology.replicas)
    of_sequence = {number: tokens for part in parts for number, tokens in part.items()}
    return torch.cat([of_sequence[number] for number in sorted(of_sequence)])


def micro_batches(
    batch: Batch,
    topology: Topology,
    budget: int,
    device: torch.device,
    depths: int = 0,
    own_state: bool = False,
    padded: bool = True,
) -> MicroBatches:
    """A replica's micro-batches of at most `budget` tokens; equally many on every replica, all of which must call it.

    Megatron's interleaved schedule needs a multiple of the pipeline size.

    Args:
        batch: The replica's sequences, possibly none; on the CPU, the same on all its ranks.
        topology: This process's ranks.
        budget: Largest number of tokens of a micro-batch; a longer sequence has a micro-batch to itself.
        device: Device of the micro-batches.
        depths: Depths of multi-token prediction, which reads that many tokens ahead: the last tokens of a prompt then
            compute something different in every sequence, and are not shared.
        own_state: Whether a token is scored by its own hidden state; otherwise the one before it, which predicts it.
        padded: Whether attention is computed in a table, which limits what a micro-batch holds.

    Raises:
        ValueError: The mask includes the first token of a sequence or of a piece, which nothing predicts.
    """
    # A prediction module at the end of a prompt reads the first tokens of the completion, so those rows cannot be
    # shared.
    batch = batch.with_(prompt_lengths=(batch.prompt_lengths - depths).clamp(min=0))
    in_pieces, pieces = batch.in_pieces(), batch.pieces.tolist()
    if not own_state and batch.mask[in_pieces.cu_seqlens[:-1]].any():
        raise ValueError("mask marks the first token of a sequence or piece, which nothing predicts; set it to False")
    lengths, prompts, shared = batch.lengths.tolist(), batch.prompts.tolist(), batch.prompt_lengths.tolist()
    plan = fill(lengths, prompts, shared, budget, cells_per_token(topology.cp_size, padded), pieces)
    sizes = topology.of_every_replica([len(plan), sum(pieces), len(batch.tokens), int(batch.mask.sum())])
    counts, *totals = zip(*sizes, strict=True)
    # Replicas with fewer micro-batches compute empty ones, because all must take part in the same collectives.
    count = max(1, *counts)
    count += -count % (topology.pp_size if topology.interleaved else 1)
    plan += [[] for _ in range(count - len(plan))]
    ends = [*accumulate(pieces)]
    plan = [[piece for i in sequences for piece in range(ends[i] - pieces[i], ends[i])] for sequences in plan]
    return MicroBatches(in_pieces, plan, Totals(*map(sum, totals)), topology, device, depths, own_state, padded)


def _micro_batch(of: MicroBatches, sequences: list[int]) -> MicroBatch:
    batch, topology, device, depths, own_state = of.batch, of.topology, of.device, of.depths, of.own_state
    chosen = torch.tensor(sequences, dtype=torch.int64)
    lengths, starts = batch.lengths[chosen], batch.cu_seqlens[chosen]
    packed = PackedTokens.of_sequences(
        lengths,
        of._multiple,
        prompts=batch.prompts[chosen],
        prompt_lengths=batch.prompt_lengths[chosen],
        table=of.padded,
    ).sharded(topology.cp_rank, topology.cp_size)
    index = torch.cat([torch.arange(0), *map(torch.arange, starts, starts + lengths)])  # [E] in the batch
    ends = lengths.cumsum(0)[packed.sequence]  # [E] where the token's sequence ends, among the E
    tokens = batch.tokens[index].long()
    if depths:
        # Of each token the one that is so many positions later in the same sequence, 0 after its end.
        later = [torch.arange(len(tokens)) + distance for distance in range(1, depths + 1)]
        ahead = [torch.where(at < ends, tokens[at.clamp(max=len(tokens) - 1)], 0) for at in later]
        packed.ahead = torch.stack([_in_rows(shifted, packed) for shifted in ahead])
    if batch.experts is not None:
        packed.experts = _in_rows(batch.experts[index], packed, padding=-1)
    scored = batch.mask[index].nonzero()[:, 0]
    rows, local = _rows_before(scored, 0 if own_state else 1, packed)
    scored_index = index[scored[local]]
    predicted = []
    for depth in range(1, depths + 1):
        before, which = _rows_before(scored, 1 + depth, packed)
        predicted.append(Predicted(moved(before, device), moved(tokens[scored[which]], device)))
    # Losses of whole sequences need to know which of this rank's scored tokens belong together, those of all pieces.
    samples, of_piece = batch.numbers[chosen].unique_consecutive(return_inverse=True)
    per_sequence = of_piece[packed.sequence[scored[local]]].bincount(minlength=len(samples))
    return MicroBatch(
        tokens=moved(_in_rows(tokens, packed)[None], device),
        packed=packed.to(device),
        rows=moved(rows, device),
        scored=ScoredTokens.of(batch, scored_index, F.pad(per_sequence.cumsum(0), (1, 0))).each(
            partial(moved, device=device)
        ),
        ahead=predicted,
    )


def _in_rows(values: torch.Tensor, packed: PackedTokens, padding: int = 0) -> torch.Tensor:
    """[E, ...] values of tokens -> [T', ...] values of this rank's rows; `padding` for rows of no token."""
    values = values[packed.owners]
    values = torch.cat([values, values.new_full((packed.padding, *values.shape[1:]), padding)])
    return values if packed.shard is None else values[packed.shard.rows]


def _rows_before(scored: torch.Tensor, distance: int, packed: PackedTokens) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of this rank that are `distance` tokens before the scored ones.

    Scored tokens ([n] of the E) with fewer tokens before them in their sequence are left out, and those whose row
    another rank holds.

    Returns:
        [m] rows, and [m] indices of their tokens among the n.
    """
    inside = scored >= distance
    # The row before the first token of a sequence is the last one of another sequence.
    inside &= packed.sequence[(scored - distance).clamp(min=0)] == packed.sequence[scored]
    which = inside.nonzero()[:, 0]
    rows = packed.rows[scored[which] - distance]
    if packed.shard is None:
        return rows, which
    # Under context parallelism: number of each row among those of this rank, -1 for rows of others.
    local = torch.full((packed.total,), -1)
    local[packed.shard.rows] = torch.arange(len(packed.shard.rows))
    held = local[rows] >= 0
    return local[rows][held], which[held]
