"""Rotary positions of packed tokens equal what Megatron's own embedding does to each sequence alone."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig

from grpo_mega.policy.attention import KVCache, PackedTokens
from grpo_mega.policy.rotary import use_packed_rotary
from grpo_mega.policy.topology import Topology

HEADS, CHANNELS, CONTEXT = 2, 8, 16
CONFIG = TransformerConfig(num_layers=1, hidden_size=HEADS * CHANNELS, num_attention_heads=HEADS)


def rotary(packed: bool) -> RotaryEmbedding:
    embedding = RotaryEmbedding(CHANNELS, rotary_percent=1.0, rotary_base=100)
    if packed:
        use_packed_rotary(embedding, CONTEXT)
    return embedding


def rotated(x: torch.Tensor, packed: PackedTokens) -> torch.Tensor:
    embedding = rotary(packed=True)
    angles = embedding(embedding.get_rotary_seq_len(None, None, x, CONFIG, packed))
    return apply_rotary_pos_emb(x, angles, CONFIG, cu_seqlens=packed.cu_seqlens_q)


def alone(x: torch.Tensor) -> torch.Tensor:
    """[L, heads, channels] of one sequence, through Megatron as it is."""
    return apply_rotary_pos_emb(x[:, None], rotary(packed=False)(len(x)), CONFIG)[:, 0]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, CONTEXT), min_size=1, max_size=5), st.integers(1, 4))
def test_whole_sequences(topology: Topology, lengths: list[int], multiple: int) -> None:
    packed = PackedTokens.of_lengths(torch.tensor(lengths), multiple)
    x = torch.randn(sum(lengths) + packed.padding, HEADS, CHANNELS, generator=torch.Generator().manual_seed(2))
    real = x[: sum(lengths)]
    expected = torch.cat([alone(sequence) for sequence in real.split(lengths)])
    torch.testing.assert_close(rotated(x, packed)[: len(real)], expected, atol=0, rtol=0)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, CONTEXT - 1), min_size=1, max_size=5), st.integers(1, 4))
def test_one_token_each(topology: Topology, positions: list[int], multiple: int) -> None:
    packed = PackedTokens.one_each(torch.tensor(positions), multiple, KVCache(CONTEXT))
    sequences = torch.randn(len(positions), CONTEXT, HEADS, CHANNELS, generator=torch.Generator().manual_seed(2))
    x = torch.stack([sequence[p] for sequence, p in zip(sequences, positions, strict=True)])
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, packed.padding))
    expected = torch.stack([alone(sequence)[p] for sequence, p in zip(sequences, positions, strict=True)])
    torch.testing.assert_close(rotated(x, packed)[: len(positions)], expected, atol=0, rtol=0)
