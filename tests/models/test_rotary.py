"""Rotary positions of packed tokens equal what Megatron's own embedding does to each sequence alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig

from grpo_mega.config.schema import YarnConfig
from grpo_mega.models.megatron.packed import KVCache, PackedTokens
from grpo_mega.models.megatron.rotary import cos_sin, rotate, use_packed_rotary
from grpo_mega.models.topology import Topology

HEADS, CHANNELS, CONTEXT = 2, 8, 16
CONFIG = TransformerConfig(num_layers=1, hidden_size=HEADS * CHANNELS, num_attention_heads=HEADS)


BASE = 100
RELEASED = YarnConfig(factor=32.0, original_context=4096, truncate=False)
"""GPT-OSS's, with a base of 150000 and 64 channels."""
YARNS = {
    "gpt_oss": (150_000, 64, RELEASED),
    "whole": (150_000, 64, YarnConfig(factor=32.0, original_context=4096)),
    "narrow": (100, 12, YarnConfig(factor=4.0, original_context=16, beta_fast=1.5, beta_slow=0.2, truncate=False)),
    "all_between": (100, 12, YarnConfig(factor=4.0, original_context=6, beta_fast=32.0, beta_slow=1e-9)),
    "one_place": (100, 12, YarnConfig(factor=4.0, original_context=6, beta_fast=1.0, beta_slow=1.0, truncate=False)),
}


@pytest.mark.parametrize("name", YARNS)
def test_yarn_is_that_of_transformers(name: str) -> None:
    """Frequencies, and how much longer the vector of cosine and sine is; logits grow by the square of that."""
    rope_utils, (base, channels, yarn) = pytest.importorskip("transformers.modeling_rope_utils"), YARNS[name]
    from transformers import GptOssConfig

    rope = {
        "rope_type": "yarn", "rope_theta": float(base), "factor": yarn.factor, "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow, "original_max_position_embeddings": yarn.original_context,
        "truncate": yarn.truncate,
    }  # fmt: skip
    config = GptOssConfig(head_dim=channels, rope_parameters=rope)
    frequencies, length = rope_utils.ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    positions = torch.tensor([0, 1, 5, 100])
    cos, sin = cos_sin(positions, channels, base, yarn=yarn)
    angles = (positions[:, None] * frequencies)[:, None]
    torch.testing.assert_close(cos, angles.cos() * length, atol=2e-5, rtol=0)
    torch.testing.assert_close(sin, angles.sin() * length, atol=2e-5, rtol=0)
    assert length > 1.1


def megatron_rotary() -> RotaryEmbedding:
    return RotaryEmbedding(CHANNELS, rotary_percent=1.0, rotary_base=BASE)


def by_rotate(x: torch.Tensor, packed: PackedTokens) -> torch.Tensor:
    """As grouped-query attention does it."""
    return rotate(x, *cos_sin(packed.positions, CHANNELS, BASE))


def by_megatron(x: torch.Tensor, packed: PackedTokens) -> torch.Tensor:
    """As latent attention does it."""
    embedding = megatron_rotary()
    use_packed_rotary(embedding, CONTEXT)
    angles = embedding(embedding.get_rotary_seq_len(None, None, x, CONFIG, packed))
    return apply_rotary_pos_emb(x, angles, CONFIG, cu_seqlens=packed.cu_seqlens_q)


def alone(x: torch.Tensor) -> torch.Tensor:
    """[L, heads, channels] of one sequence, through Megatron as it is."""
    return apply_rotary_pos_emb(x[:, None], megatron_rotary()(len(x)), CONFIG)[:, 0]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, CONTEXT), min_size=1, max_size=5), st.integers(1, 4))
def test_whole_sequences(topology: Topology, lengths: list[int], multiple: int) -> None:
    packed = PackedTokens.of_sequences(torch.tensor(lengths), multiple)
    x = torch.randn(sum(lengths) + packed.padding, HEADS, CHANNELS, generator=torch.Generator().manual_seed(2))
    real = x[: sum(lengths)]
    expected = torch.cat([alone(sequence) for sequence in real.split(lengths)])
    torch.testing.assert_close(by_megatron(x, packed)[: len(real)], expected, atol=0, rtol=0)
    torch.testing.assert_close(by_rotate(x, packed)[: len(real)], expected, atol=1e-6, rtol=1e-6)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, CONTEXT - 1), min_size=1, max_size=5), st.integers(1, 4))
def test_one_token_each(topology: Topology, positions: list[int], multiple: int) -> None:
    packed = PackedTokens.one_each(torch.tensor(positions), multiple, KVCache(CONTEXT))
    sequences = torch.randn(len(positions), CONTEXT, HEADS, CHANNELS, generator=torch.Generator().manual_seed(2))
    x = torch.stack([sequence[p] for sequence, p in zip(sequences, positions, strict=True)])
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, packed.padding))
    expected = torch.stack([alone(sequence)[p] for sequence, p in zip(sequences, positions, strict=True)])
    torch.testing.assert_close(by_megatron(x, packed)[: len(positions)], expected, atol=0, rtol=0)
    torch.testing.assert_close(by_rotate(x, packed)[: len(positions)], expected, atol=1e-6, rtol=1e-6)


def test_gradient_of_rotate() -> None:
    x = torch.randn(5, HEADS, CHANNELS, dtype=torch.float64, requires_grad=True)
    cos, sin = (angles.double() for angles in cos_sin(torch.arange(5), CHANNELS, BASE))
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), x)


def test_channels_after_those_with_angles_stay() -> None:
    x = torch.randn(5, HEADS, CHANNELS + 6, generator=torch.Generator().manual_seed(2), requires_grad=True)
    cos, sin = cos_sin(torch.arange(5), CHANNELS, BASE)
    turned = rotate(x, cos, sin)
    assert torch.equal(turned[..., CHANNELS:], x[..., CHANNELS:])
    assert torch.equal(turned[..., :CHANNELS], rotate(x[..., :CHANNELS], cos, sin))
    (grad,) = torch.autograd.grad(turned[..., CHANNELS:].sum(), x)
    assert torch.equal(grad, (torch.arange(CHANNELS + 6) >= CHANNELS).float().expand_as(x))
