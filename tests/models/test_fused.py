"""Fused paths of Transformer Engine's kernels: which a model takes, and that replayed experts are not chosen by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.fusions.fused_bias_geglu import quick_gelu, weighted_bias_quick_geglu_impl
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl, weighted_bias_swiglu_impl

from grpo_mega.config.schema import ModelConfig, MoEConfig
from grpo_mega.models.families.gpt_oss import LIMIT
from grpo_mega.models.megatron.fused import fused_options
from grpo_mega.models.megatron.layers import _SwiGLU, gelu_tanh

NAMES = ("moe_permute_fusion", "moe_router_fusion", "bias_activation_fusion")
silu = torch.nn.functional.silu


@pytest.mark.parametrize(
    ("experts", "activation", "transformer_engine", "taken"),
    [
        (8, silu, True, NAMES),
        (8, quick_gelu, True, NAMES),
        (8, gelu_tanh, True, NAMES[:2]),  # Megatron has none of it
        (0, silu, True, NAMES[2:]),
        (8, silu, False, ()),
    ],
)
def test_what_is_taken(experts: int, activation: object, transformer_engine: bool, taken: tuple[str, ...]) -> None:
    options = fused_options(ModelConfig(moe=MoEConfig(experts=experts)), activation, transformer_engine)
    assert options == {name: name in taken for name in NAMES}


@given(rows=st.integers(1, 9), seed=st.integers(0, 99))
def test_fused_activations_are_those_that_they_replace(rows: int, seed: int) -> None:
    """Megatron's, compiled on a GPU and a chain of operations here, against the formulas, with their gradients."""
    torch.manual_seed(seed)
    x = (3 * torch.randn(rows, 16, dtype=torch.float64)).requires_grad_()
    weight = torch.rand(rows, 1, dtype=torch.float64).requires_grad_()
    a, b = x.chunk(2, -1)
    clamped = a.clamp(max=LIMIT), b.clamp(-LIMIT, LIMIT)
    pairs = [
        (bias_swiglu_impl(x, None), silu(a) * b),
        (bias_swiglu_impl(x[:, None], None), _SwiGLU.apply(x[:, None])),  # what dense layers have without a GPU
        (weighted_bias_swiglu_impl(x, None, weight), silu(a) * b * weight),
        (
            weighted_bias_quick_geglu_impl(x, None, weight, False, 1.0, LIMIT),
            quick_gelu(clamped[0]) * (clamped[1] + 1) * weight,
        ),
    ]
    for fused, plain in pairs:
        torch.testing.assert_close(fused, plain)
        grad = torch.randn_like(plain)
        of_fused = torch.autograd.grad(fused, (x, weight), grad, allow_unused=True)
        of_plain = torch.autograd.grad(plain, (x, weight), grad, allow_unused=True)
        torch.testing.assert_close(of_fused, of_plain)
