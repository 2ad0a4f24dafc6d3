"""The float64 reference against finite differences, and against autograd where that is exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import GRPOLoss, reference

N, V = 6, 5
CU_SEQLENS = torch.tensor([0, 2, 2, 6])
OPTIONS = [
    GRPOLoss(),
    GRPOLoss(clip_low=10.0, clip_high=10.0),
    GRPOLoss(dual_clip=1.5, kl="k1", kl_coef=0.3),
    GRPOLoss(kl="k2", kl_coef=0.3, entropy_coef=0.2),
    GRPOLoss(kl="k3", kl_coef=0.3, correction="truncate", correction_cap=1.1),
    GRPOLoss(correction="mask", correction_cap=1.1, entropy_coef=-0.1),
    GRPOLoss(kind="gspo", clip_low=0.05, clip_high=0.05, entropy_coef=0.1),
    GRPOLoss(kind="gspo", dual_clip=1.5, kl_coef=0.1, correction="mask", correction_cap=1.1),
]
CISPO = [
    GRPOLoss(kind="cispo"),
    GRPOLoss(kind="cispo", clip_low=1.0, clip_high=float("inf")),
    GRPOLoss(kind="cispo", clip_low=0.1, clip_high=0.1, kl_coef=0.2, entropy_coef=0.1),
]


def arguments(options: GRPOLoss, seed: int) -> tuple[Tensor, dict[str, Any]]:
    """[N, V] logits with some of -inf, and everything else."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(N, V, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, V - 1, (N,), generator=generator)
    logprob = reference.log_softmax(logits, 1.3)[torch.arange(N), ids]
    noise = torch.randn(3, N, generator=generator) * 0.5
    logits[0, V - 1] = -torch.inf
    return logits, {
        "ids": ids,
        "old_logprob": logprob + noise[0],
        "ref_logprob": logprob + noise[1],
        "advantages": torch.tensor([1.0, -1.0, 2.0, -0.5, 0.0, -3.0]),
        "token_weight": torch.tensor([0.5, 1.0, 0.0, 2.0, 1.0, 1.0]),
        "options": options,
        "temperature": 1.3,
        "rollout_logprob": logprob + noise[2],
        "cu_seqlens": CU_SEQLENS,
    }


class OracleLoss(torch.autograd.Function):
    """The reference's loss with the gradient it claims."""

    @staticmethod
    def forward(ctx: Any, finite: Tensor, logits: Tensor, given: dict[str, Any]) -> Tensor:
        found = reference.grpo_loss(torch.where(torch.isinf(logits), logits, finite), **given)
        ctx.save_for_backward(found.gradient)
        return found.loss.sum()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor, None, None]:
        return ctx.saved_tensors[0] * factor, None, None


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradient_is_that_of_the_loss(options: GRPOLoss, seed: int) -> None:
    logits, given = arguments(options, seed)
    finite = torch.where(torch.isinf(logits), 0.0, logits).requires_grad_()
    assert torch.autograd.gradcheck(OracleLoss.apply, (finite, logits, given), atol=1e-7)


@pytest.mark.parametrize("options", CISPO, ids=str)
def test_gradient_of_cispo_holds_the_clipped_ratio_constant(options: GRPOLoss) -> None:
    logits, given = arguments(options, 0)
    logits[0, V - 1] = 0.0  # autograd has no gradient at -inf
    logits.requires_grad_()
    log_p = (logits / 1.3).log_softmax(-1)
    logprob = log_p[torch.arange(N), given["ids"]]
    ratio = (logprob - given["old_logprob"]).exp().clamp(1 - options.clip_low, 1 + options.clip_high)
    difference = given["ref_logprob"] - logprob
    loss = -ratio.detach() * given["advantages"] * logprob
    loss = loss + options.kl_coef * (difference.exp() - difference - 1)
    loss = (loss + options.entropy_coef * (log_p.exp() * log_p).sum(-1)) * given["token_weight"]
    found = reference.grpo_loss(logits.detach(), **given)
    torch.testing.assert_close(found.loss, loss.detach())
    torch.testing.assert_close(found.gradient, torch.autograd.grad(loss.sum(), logits)[0])


def test_minus_infinity_is_a_probability_of_zero() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0], [-torch.inf, 7.0, -torch.inf]])
    log_p = reference.log_softmax(logits, 0.5)
    assert torch.equal(log_p.exp(), torch.tensor([[0.5, 0.0, 0.5], [0.0, 1.0, 0.0]], dtype=torch.float64))
    torch.testing.assert_close(reference.entropies(log_p), torch.tensor([2.0, 1.0], dtype=torch.float64).log())
