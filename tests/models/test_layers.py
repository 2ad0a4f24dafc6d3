"""RMSNorm equals torch's, value and gradient; Gemma's post-norms, scaled embeddings and norms from zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from grpo_mega.models.megatron.layers import RMSNorm
from grpo_mega.models.policy import Policy
from grpo_mega.types import Batch

MakePolicy = Callable[..., Policy]
LAST = ("linear_proj.weight", "linear_fc2.weight")
"""What attention and feed-forward end with."""
HIDDEN = 8
CONFIG = TransformerConfig(num_layers=1, hidden_size=HIDDEN, num_attention_heads=1)


@pytest.mark.parametrize("shape", [(5, 1, HIDDEN), (3, 2, 4, HIDDEN), (0, 1, HIDDEN)])
def test_a_norm_and_its_gradient_are_torch_s(shape: tuple[int, ...]) -> None:
    norm = RMSNorm(CONFIG, HIDDEN, eps=1e-2)
    torch.nn.init.uniform_(norm.weight)
    x, grad = torch.randn(shape, requires_grad=True), torch.randn(shape)
    expected = torch.nn.functional.rms_norm(x, (HIDDEN,), norm.weight, 1e-2)
    torch.testing.assert_close(norm(x), expected)
    ours = torch.autograd.grad(norm(x), (x, norm.weight), grad)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, (x, norm.weight), grad))


def test_a_norm_in_bf16_is_torch_s() -> None:
    norm = RMSNorm(CONFIG, HIDDEN).bfloat16()
    x = torch.randn(4, HIDDEN, dtype=torch.bfloat16)
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (HIDDEN,), norm.weight, 1e-5))


@torch.no_grad()
def enlarged(policy: Policy) -> Policy:
    """The policy with what every layer adds to the hidden states a hundred times larger, but for its norm."""
    for name, parameter in policy.chunks.named_parameters():
        if name.endswith(LAST):
            parameter.mul_(100)
    return policy


def test_how_large_the_output_of_a_layer_is_does_not_matter(make_policy: MakePolicy, batch: Batch) -> None:
    usual, large = (make_policy("tied", family="gemma3_text", norm_eps=1e-12) for _ in range(2))
    expected = usual.logprobs(batch, 1.0)
    assert expected[batch.mask].std() > 0.5
    torch.testing.assert_close(enlarged(large).logprobs(batch, 1.0), expected, atol=1e-4, rtol=0)


def test_embeddings_are_as_large_as_hidden_states(make_policy: MakePolicy) -> None:
    policy, ids = make_policy("tied", family="gemma3_text"), torch.arange(5)[None]
    embedding = policy.chunks.last.embedding
    expected = embedding.word_embeddings.weight[:5] * 32**0.5
    torch.testing.assert_close(embedding(ids, ids)[:, 0], expected)


@pytest.mark.parametrize("gemma", [False, True])
def test_norms_start_as_the_identity(gemma: bool, make_policy: MakePolicy) -> None:
    """Gemma's multiply by 1 + weight."""
    policy = make_policy("tied", family="gemma3_text" if gemma else None)
    norms = {name: weight for name, weight in policy.chunks.named_parameters() if "norm" in name}
    assert len(norms) == 2 * (2 + 2 + 2 * gemma) + 1
    assert all(torch.equal(weight, torch.full_like(weight, not gemma)) for weight in norms.values())


def test_windows_change_log_probs_beyond_them_only(make_policy: MakePolicy, batch: Batch) -> None:
    """Of two layers the second sees everything; a window of 6 tokens is none for the first five that are predicted."""
    every, window = (make_policy("dense", window=window, full_every=2).logprobs(batch, 1.0) for window in (24, 6))
    positions = torch.cat([torch.arange(length) for length in batch.lengths.tolist()])
    within = positions <= 6
    torch.testing.assert_close(window[within], every[within], atol=1e-6, rtol=0)
    beyond = (window - every).abs()[batch.mask & ~within]
    assert (beyond > 1e-6).all(), "every later token that is predicted"
