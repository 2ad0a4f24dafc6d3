"""Cuts the global batch into this rank's packed micro-batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F

from grpo_mega.models.megatron.packed import PackedTokens
from grpo_mega.models.schedule import cells_per_token, schedule
from grpo_mega.models.topology import Topology
from grpo_mega.types import Batch


@dataclass(frozen=True)
class ScoredTokens:
    """What a loss may read about the n tokens it scores; every field but the last is [n], see `Batch`.

    Attributes:
        index: Place of each in the global batch.
        cu_seqlens: [B + 1] where the scored tokens of each sequence of the micro-batch begin, and n; None for a part.
    """

    index: torch.Tensor
    tokens: torch.Tensor
    weight: torch.Tensor
    advantage: torch.Tensor
    rollout_logprob: torch.Tensor
    old_logprob: torch.Tensor
    ref_logprob: torch.Tensor
    cu_seqlens: torch.Tensor | None = None

    @classmethod
    def of(cls, batch: Batch, index: torch.Tensor, cu_seqlens: torch.Tensor | None) -> ScoredTokens:
        """Those at [n] places of the batch."""
        known = {name: getattr(batch, name)[index] for name in _per_token() if name != "index"}
        return cls(index=index, **known, cu_seqlens=cu_seqlens)

    def part(self, which: slice) -> ScoredTokens:
        """Some of them."""
        return ScoredTokens(**{name: getattr(self, name)[which] for name in _per_token()})

    def to(self, device: torch.device) -> ScoredTokens:
        """The same on a device."""
        ends = self.cu_seqlens if self.cu_seqlens is None else self.cu_seqlens.to(device)
        return ScoredTokens(**{name: getattr(self, name).to(device) for name in _per_token()}, cu_seqlens=ends)


def _per_token() -> list[str]:
    return [f.name for f in fields(ScoredTokens) if f.name != "cu_seqlens"]


@dataclass(frozen=True)
class Predicted:
    """Scored tokens that a prediction module predicts from further back; all but those too near the beginning.

    Attributes:
        rows: [m] rows of T' whose state predicts them.
        tokens: [m] the tokens.
    """

    rows: torch.Tensor
    tokens: torch.Tensor


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass on one rank.

    Attributes:
        tokens: [1, T'] packed sequences and padding; with context parallelism this rank's rows of them.
        packed: How they split into sequences.
        rows: [n] rows of T' whose hidden state predicts a scored token, or is its own.
        scored: The scored tokens.
        ahead: For each depth of multi-token prediction what its module predicts.
    """

    tokens: torch.Tensor
    packed: PackedTokens
    rows: torch.Tensor
    scored: ScoredTokens
    ahead: list[Predicted]

    @property
    def index(self) -> torch.Tensor:
        """[n] place of each scored token in the global batch."""
        return self.scored.index


@dataclass(frozen=True)
class MicroBatches:
    """This rank's micro-batches of a batch. Their number is known; each is made when it is asked for, and not kept.

    A pass over a whole step can be hundreds of them: together they would fill a GPU.

    Attributes:
        batch: The global batch.
        plan: Sequence numbers of each micro-batch of this rank.
        depths: How many tokens ahead multi-token prediction reads.
        own: Whether a scored token is scored by its own hidden state, not by the one that predicts it.
    """

    batch: Batch
    plan: list[list[int]]
    topology: Topology
    device: torch.device
    depths: int
    own: bool

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[MicroBatch]:
        for sequences in self.plan:
            yield self._made(sequences)

    def readers(self, count: int) -> list[Iterator[MicroBatch]]:
        """`count` iterators over the same objects, one for each of a rank's interleaved pieces of the model.

        A micro-batch is let go when the last reader has it. (`itertools.tee` would hold on to dozens of them.)
        """
        made, waiting = iter(self), [deque[MicroBatch]() for _ in range(count)]

        def read(mine: deque[MicroBatch]) -> Iterator[MicroBatch]:
            for _ in self.plan:
                if not mine:
                    following = next(made)
                    for queue in waiting:
                        queue.append(following)
                    del following
                yield mine.popleft()

        return [read(mine) for mine in waiting]

    def _made(self, sequences: list[int]) -> MicroBatch:
        micro = _micro_batch(self.batch, sequences, self.topology, self.device, self.depths, self.own)
        micro.packed.batch_sequences, micro.packed.batch_tokens = len(self.batch.lengths), len(self.batch.tokens)
        micro.packed.loss_scale = len(self) * self.topology.dp_size
        return micro


def micro_batches(
    batch: Batch, topology: Topology, budget: int, device: torch.device, depths: int = 0, own: bool = False
) -> MicroBatches:
    """This rank's micro-batches of at most `budget` tokens; equally many on every data parallel rank.

    Megatron's interleaved schedule wants a multiple of the pipeline size. `depths` of multi-token prediction read that
    many tokens ahead, so the last tokens of a prompt compute something else in every sequence, and are not shared. With
    `own` a token is scored by its own hidden state, otherwise by the one before it, which predicts it.

    Raises:
        ValueError: The first token of a sequence is to be scored, and nothing predicts it.
    """
    starts = batch.cu_seqlens[:-1]
    if not own and batch.mask[starts].any():
        raise ValueError("mask marks the first token of a sequence, which nothing predicts; set it to False")
    batch = batch.with_(prompt_lengths=(batch.prompt_lengths - depths).clamp(min=0))
    plan = schedule(
        batch.lengths.tolist(),
        batch.prompts.tolist(),
        batch.prompt_lengths.tolist(),
        topology.dp_size,
        budget,
        multiple=topology.pp_size if topology.interleaved else 1,
        cells=cells_per_token(topology.cp_size),
    )
    return MicroBatches(batch, plan[topology.dp_rank], topology, device, depths, own)


def _micro_batch(
    batch: Batch, sequences: list[int], topology: Topology, device: torch.device, depths: int, own: bool
) -> MicroBatch:
    chosen = torch.tensor(sequences, dtype=torch.int64)
    lengths, starts = batch.lengths[chosen], batch.cu_seqlens[chosen]
    packed = PackedTokens.of_sequences(
        lengths,
        topology.row_multiple * topology.cp_size,
        prompts=batch.prompts[chosen],
        prompt_lengths=batch.prompt_lengths[chosen],
    ).sharded(topology.cp_rank, topology.cp_size)
    places = torch.cat([torch.arange(0), *map(torch.arange, starts, starts + lengths)])  # [E] in the global batch
    ends = lengths.cumsum(0)[packed.sequence]  # [E] where the token's sequence ends, among the E
    tokens = batch.tokens[places]
    if depths:
        ahead = [_in_rows(_shifted(tokens, ends, depth), packed) for depth in range(1, depths + 1)]
        packed.ahead = torch.stack(ahead)
    if batch.experts is not None:
        packed.experts = _in_rows(batch.experts[places], packed, padding=-1)
    scored = batch.mask[places].nonzero()[:, 0]
    rows, here = _rows_before(scored, 0 if own else 1, packed)
    index = places[scored[here]]
    per_sequence = packed.sequence[scored[here]].bincount(minlength=len(sequences))
    return MicroBatch(
        tokens=_in_rows(tokens, packed)[None].to(device),
        packed=packed.to(device),
        rows=rows.to(device),
        scored=ScoredTokens.of(batch, index, F.pad(per_sequence.cumsum(0), (1, 0))).to(device),
        ahead=[_predicted(scored, tokens, depth, packed, device) for depth in range(1, depths + 1)],
    )


def _in_rows(values: torch.Tensor, packed: PackedTokens, padding: int = 0) -> torch.Tensor:
    """[E, ...] something per token -> [T', ...] per row of this rank; `padding` for rows of no token."""
    values = values[packed.owners]
    values = torch.cat([values, values.new_full((packed.padding, *values.shape[1:]), padding)])
    return values if packed.shard is None else values[packed.shard.rows]


def _shifted(tokens: torch.Tensor, ends: torch.Tensor, distance: int) -> torch.Tensor:
    """[E] the token that comes `distance` places later in the same sequence, 0 behind its end."""
    later = torch.arange(len(tokens)) + distance
    return torch.where(later < ends, tokens[later.clamp(max=len(tokens) - 1)], 0)


def _rows_before(scored: torch.Tensor, distance: int, packed: PackedTokens) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of this rank that lie `distance` tokens before scored ones ([n] of the E), and which of these those are.

    Left out are tokens without one so far before them in their sequence, and those whose row another rank holds.
    """
    inside = scored >= distance
    inside &= packed.sequence[(scored - distance).clamp(min=0)] == packed.sequence[scored]
    which = inside.nonzero()[:, 0]
    rows = packed.rows[scored[which] - distance]
    if packed.shard is None:
        return rows, which
    here = torch.full((packed.total,), -1)
    here[packed.shard.rows] = torch.arange(len(packed.shard.rows))
    held = here[rows] >= 0
    return here[rows][held], which[held]


def _predicted(
    scored: torch.Tensor, tokens: torch.Tensor, depth: int, packed: PackedTokens, device: torch.device
) -> Predicted:
    rows, which = _rows_before(scored, 1 + depth, packed)
    return Predicted(rows.to(device), tokens[scored[which]].to(device))
