"""RMSNorm equals torch's, value and gradient."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from grpo_mega.models.megatron.layers import RMSNorm

HIDDEN = 8
CONFIG = TransformerConfig(num_layers=1, hidden_size=HIDDEN, num_attention_heads=1)


@pytest.mark.parametrize("shape", [(5, 1, HIDDEN), (3, 2, 4, HIDDEN), (0, 1, HIDDEN)])
def test_same_as_torch(shape: tuple[int, ...]) -> None:
    norm = RMSNorm(CONFIG, HIDDEN, eps=1e-2)
    torch.nn.init.uniform_(norm.weight)
    x, grad = torch.randn(shape, requires_grad=True), torch.randn(shape)
    expected = torch.nn.functional.rms_norm(x, (HIDDEN,), norm.weight, 1e-2)
    torch.testing.assert_close(norm(x), expected)
    ours = torch.autograd.grad(norm(x), (x, norm.weight), grad)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, (x, norm.weight), grad))


def test_bf16() -> None:
    norm = RMSNorm(CONFIG, HIDDEN).bfloat16()
    x = torch.randn(4, HIDDEN, dtype=torch.bfloat16)
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (HIDDEN,), norm.weight, 1e-5))
