"""Cuts the global batch into this rank's packed micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F

from grpo_mega.policy.packed import PackedTokens
from grpo_mega.policy.schedule import schedule
from grpo_mega.policy.topology import Topology
from grpo_mega.types import Batch


@dataclass(frozen=True)
class ScoredTokens:
    """What a token loss may read about the n tokens it scores; every field is [n], see `Batch`."""

    tokens: torch.Tensor
    weight: torch.Tensor
    advantage: torch.Tensor
    old_logprob: torch.Tensor
    ref_logprob: torch.Tensor


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass on one rank.

    Attributes:
        tokens: [1, T'] packed sequences and padding; with context parallelism this rank's rows of them.
        packed: How they split into sequences.
        rows: [n] rows of T' whose hidden state predicts a scored token.
        index: [n] place of each scored token in the global batch.
        scored: The scored tokens.
    """

    tokens: torch.Tensor
    packed: PackedTokens
    rows: torch.Tensor
    index: torch.Tensor
    scored: ScoredTokens


def micro_batches(batch: Batch, topology: Topology, budget: int, device: torch.device) -> list[MicroBatch]:
    """This rank's micro-batches of at most `budget` tokens; equally many on every data parallel rank.

    Megatron's interleaved schedule wants a multiple of the pipeline size.

    Raises:
        ValueError: The first token of a sequence is to be scored; nothing predicts it.
    """
    starts = batch.cu_seqlens[:-1]
    if batch.mask[starts].any():
        raise ValueError("mask marks the first token of a sequence, which nothing predicts; set it to False")
    plan = schedule(
        batch.lengths.tolist(),
        batch.prompts.tolist(),
        batch.prompt_lengths.tolist(),
        topology.dp_size,
        budget,
        multiple=topology.pp_size if topology.interleaved else 1,
    )
    mine = plan[topology.dp_rank]
    micros = [_micro_batch(batch, sequences, topology, device) for sequences in mine]
    for micro in micros:
        micro.packed.batch_sequences, micro.packed.batch_tokens = len(batch.lengths), len(batch.tokens)
        micro.packed.loss_scale = len(micros) * topology.dp_size
    return micros


def _micro_batch(batch: Batch, sequences: list[int], topology: Topology, device: torch.device) -> MicroBatch:
    chosen = torch.tensor(sequences, dtype=torch.int64)
    lengths, starts = batch.lengths[chosen], batch.cu_seqlens[chosen]
    packed = PackedTokens.of_sequences(
        lengths,
        topology.row_multiple * topology.cp_size,
        prompts=batch.prompts[chosen],
        prompt_lengths=batch.prompt_lengths[chosen],
    ).sharded(topology.cp_rank, topology.cp_size)
    places = torch.cat([torch.arange(0), *map(torch.arange, starts, starts + lengths)])  # [E] in the global batch
    tokens = F.pad(batch.tokens[places[packed.owners]], (0, packed.padding))
    scored = batch.mask[places].nonzero()[:, 0]
    rows = packed.rows[scored - 1]
    if packed.shard is not None:
        tokens = tokens[packed.shard.rows]
        here = torch.full((packed.total,), -1)
        here[packed.shard.rows] = torch.arange(len(packed.shard.rows))
        scored, rows = scored[here[rows] >= 0], here[rows][here[rows] >= 0]
    index = places[scored]
    return MicroBatch(
        tokens=tokens[None].to(device),
        packed=packed.to(device),
        rows=rows.to(device),
        index=index.to(device),
        scored=ScoredTokens(**{f.name: getattr(batch, f.name)[index].to(device) for f in fields(ScoredTokens)}),
    )
