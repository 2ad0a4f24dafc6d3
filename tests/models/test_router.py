"""The losses that balance the experts, written out sequence by sequence, and what the router attaches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from grpo_mega.config.schema import MoEConfig
from grpo_mega.models.megatron.packed import PackedTokens
from grpo_mega.models.megatron.router import PackedRouter
from grpo_mega.models.policy import Policy

EXPERTS, TOP_K, BATCH_SEQUENCES, BATCH_TOKENS = 4, 2, 7, 50
LENGTHS, PROMPTS, PROMPT_LENGTHS = [5, 3, 6], [0, 1, 0], [4, 2, 4]
"""Three sequences of a larger batch; the first and the last share a prompt of four tokens."""


def router(make_policy: Callable[..., Policy], **losses: float) -> PackedRouter:
    moe = MoEConfig(experts=EXPERTS, top_k=TOP_K, ffn_hidden=16, **losses)
    return next(m for m in make_policy("moe", moe=moe).chunks.modules() if isinstance(m, PackedRouter))


def packed(multiple: int) -> PackedTokens:
    whole = PackedTokens.of_sequences(
        torch.tensor(LENGTHS),
        multiple,
        prompts=torch.tensor(PROMPTS),
        prompt_lengths=torch.tensor(PROMPT_LENGTHS),
    )
    return replace(whole, batch_sequences=BATCH_SEQUENCES, batch_tokens=BATCH_TOKENS, loss_scale=3.0)


def balance_loss(logits: torch.Tensor) -> torch.Tensor:
    """[T, experts] of one sequence: DeepSeek-V3, equations 17 to 20."""
    scores = logits.sigmoid()
    chosen = torch.zeros_like(scores).scatter(1, scores.topk(TOP_K).indices, 1.0)
    frequency = EXPERTS / (TOP_K * len(logits)) * chosen.sum(0)
    return (frequency * (scores / scores.sum(-1, keepdim=True)).mean(0)).sum()


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    """[T, experts] of one sequence, summed: ST-MoE, equation 5."""
    return logits.exp().sum(-1).log().square().sum()


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize(
    ("losses", "written_out", "total"),
    [
        ({"aux_loss_coef": 0.5}, balance_loss, BATCH_SEQUENCES),
        ({"z_loss_coef": 0.5}, z_loss, BATCH_TOKENS),
    ],
)
def test_attached_loss(
    make_policy: Callable[..., Policy], losses: dict[str, float], written_out: Callable, total: int, multiple: int
) -> None:
    ours = router(make_policy, **losses)
    ours.packed = packed(multiple)
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
    logits = torch.randn(ours.packed.total, EXPERTS, generator=torch.Generator().manual_seed(0), requires_grad=True)
    probs, _ = ours.routing(logits[:, None])
    (outcome,) = torch.autograd.grad(0 * probs.sum(), logits)
    sequences = logits[ours.packed.rows].split(LENGTHS)
    loss = 3.0 * 0.5 * sum(written_out(sequence) for sequence in sequences) / total
    (expected,) = torch.autograd.grad(loss, logits)
    assert expected.any()
    torch.testing.assert_close(outcome, expected, atol=1e-6, rtol=1e-5)
    assert not outcome[len(ours.packed.owners) :].any()


def test_the_bias_counts_tokens_of_sequences(make_policy: Callable[..., Policy]) -> None:
    ours = router(make_policy)
    ours.packed = packed(multiple=8)
    ours.local_tokens_per_expert.zero_()
    logits = torch.randn(ours.packed.total, 1, EXPERTS, generator=torch.Generator().manual_seed(0))
    _, chosen = ours.routing(logits)
    assert torch.equal(ours.local_tokens_per_expert, chosen[ours.packed.rows].sum(0).float())
    with torch.no_grad():
        ours.routing(logits)
    assert ours.local_tokens_per_expert.sum() == TOP_K * sum(LENGTHS)
    assert torch.equal(ours.load, ours.local_tokens_per_expert)
    ours.local_tokens_per_expert.zero_()


def test_tokens_go_to_the_experts_that_they_bring(make_policy: Callable[..., Policy]) -> None:
    """With this router's own scores; where they bring none, its scores choose as ever."""
    ours = router(make_policy)
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(12, EXPERTS, generator=random)
    brought = torch.rand(12, 2, EXPERTS, generator=random).argsort(-1)[..., :TOP_K]
    brought[::3] = -1
    ours.packed = replace(packed(multiple=1), experts=brought.to(torch.int16))
    with torch.no_grad():
        probs, chosen = ours.routing(logits[:, None])
    layer = ours.layer_number - 1 - ours.config.moe_layer_freq.index(1)
    expected = torch.where(brought[:, layer] < 0, logits.topk(TOP_K).indices, brought[:, layer])
    assert torch.equal(chosen.nonzero()[:, 1].view(-1, TOP_K), expected.sort().values)
    scores = logits.sigmoid().gather(1, expected)
    torch.testing.assert_close(probs.gather(1, expected), scores / scores.sum(-1, keepdim=True))
