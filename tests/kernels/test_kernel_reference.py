"""The float64 reference against finite differences, and against autograd of the formulas as the papers have them."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from float32_errors import Float32Errors, assert_near
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import grpo_kernels
from grpo_kernels import LossOptions, reference
from grpo_kernels.options import KINDS

N, V = 6, 5
CU_SEQLENS = torch.tensor([0, 2, 2, 6])
OPTIONS = [
    LossOptions(),
    LossOptions(clip_low=10.0, clip_high=10.0),
    LossOptions(dual_clip=1.5, kl="k1", kl_coef=0.3),
    LossOptions(kl="k2", kl_coef=0.3, entropy_coef=0.2),
    LossOptions(kl="k3", kl_coef=0.3, correction="truncate", correction_cap=1.1),
    LossOptions(correction="mask", correction_cap=1.1, entropy_coef=-0.1),
    LossOptions(kind="gspo", clip_low=0.05, clip_high=0.05, entropy_coef=0.1),
    LossOptions(kind="gspo", dual_clip=1.5, kl_coef=0.1, correction="mask", correction_cap=1.1),
    LossOptions(kl_coef=0.3, correction="mask", correction_floor=0.8, correction_cap=1.5),
    LossOptions(kind="sapo", tau_neg=2.0, kl="k3", kl_coef=0.3, kl_unbiased=True),
    LossOptions(kind="gmpo", clip_low=0.1, clip_high=0.1, entropy_coef=0.1),
    LossOptions(off_policy_mask=0.1, kl="k1", kl_coef=0.3, kl_unbiased=True),
]


def arguments(options: LossOptions, seed: int) -> tuple[Tensor, dict[str, Any]]:
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
def test_gradient_is_that_of_the_loss(options: LossOptions, seed: int) -> None:
    logits, given = arguments(options, seed)
    finite = torch.where(torch.isinf(logits), 0.0, logits).requires_grad_()
    assert torch.autograd.gradcheck(OracleLoss.apply, (finite, logits, given), atol=1e-7)


def textbook(logits: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """[n] losses as the papers write them, over the tokens that count, and by autograd the gradient of their sum.

    Shares nothing with the package: the one source of the formulas must not be its own judge.
    """
    x = logits.double().requires_grad_()
    log_p = torch.log_softmax(x / given["temperature"], -1)
    logprob = log_p[torch.arange(len(x)), given["ids"]]
    entropy = -(log_p.exp() * log_p).sum(-1)
    options, weight, advantage = given["options"], given["token_weight"].double(), given["advantages"].double()
    old = logprob.detach() if given["old_logprob"] is None else given["old_logprob"].double()
    if options.correction != "none":
        c = (old - given["rollout_logprob"]).exp()
        if options.correction == "truncate":
            advantage = advantage * c.clamp(options.correction_floor, options.correction_cap)
        else:
            within = (c >= options.correction_floor) & (c <= options.correction_cap)
            advantage, weight = advantage * c, weight * within
    counted, ends = weight != 0, given["cu_seqlens"].tolist()

    def mean(x: Tensor, counted: Tensor = counted) -> Tensor:
        means = [x[a:b][counted[a:b]].mean().expand(b - a) for a, b in pairwise(ends)]
        return torch.where(counted, torch.cat(means), 0.0)

    if options.off_policy_mask is not None:  # over all tokens of the sequence, also those that the correction masks
        deviation = given["rollout_logprob"].double() - logprob.detach()
        sampled = given.get("sampled")
        away = mean(deviation, given["token_weight"] != 0 if sampled is None else sampled) > options.off_policy_mask
        advantage = advantage.masked_fill(away & (advantage < 0), 0.0)
    of_token = logprob - old
    log_ratio = mean(of_token) if options.kind in ("gspo", "gspo_token") else of_token
    if options.kind == "gspo_token":
        log_ratio = log_ratio.detach() + logprob - logprob.detach()
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    if options.kind == "cispo":
        policy = -clipped.detach() * advantage * logprob
    elif options.kind == "sapo":
        tau = torch.tensor([options.tau_pos if a > 0 else options.tau_neg for a in advantage], dtype=torch.float64)
        policy = -advantage * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    elif options.kind == "gmpo":
        sign = torch.where(advantage < 0, -1.0, 1.0).double()
        policy = -advantage * mean(torch.minimum(ratio * sign, clipped * sign).abs().log()).exp()
    elif options.kind == "vespo":
        whole = torch.cat([of_token[a:b][counted[a:b]].sum().expand(b - a) for a, b in pairwise(ends)]).detach().exp()
        k = torch.where(advantage >= 0, options.vespo_k_pos, options.vespo_k_neg)
        rate = torch.where(advantage >= 0, options.vespo_lambda_pos, options.vespo_lambda_neg)
        policy = -(whole**k) * (rate * (1 - whole)).exp() * advantage * logprob
    else:
        policy = torch.maximum(-advantage * ratio, -advantage * clipped)
        if options.dual_clip is not None:
            policy = torch.where(advantage < 0, torch.minimum(policy, -advantage * options.dual_clip), policy)
    r = (given["ref_logprob"].double() - logprob).exp()
    kl = {"k1": -r.log(), "k2": r.log() ** 2 / 2, "k3": r - 1 - r.log()}[options.kl]
    kl = kl * of_token.exp() if options.kl_unbiased else kl
    loss = weight * (policy + options.kl_coef * kl - options.entropy_coef * entropy)
    return loss.detach(), torch.autograd.grad(loss.sum(), x)[0]


@st.composite
def settings_of_the_loss(draw: st.DrawFn) -> LossOptions:
    kind = draw(st.sampled_from(KINDS))
    return LossOptions(
        kind=kind,
        clip_low=draw(st.sampled_from([0.05, 0.3, 1.0, math.inf])),
        clip_high=draw(st.sampled_from([0.05, 0.4, math.inf])),
        dual_clip=None if kind in ("cispo", "sapo", "gmpo", "vespo") else draw(st.sampled_from([None, 1.2])),
        tau_pos=draw(st.sampled_from([1.0, 0.3])),
        tau_neg=draw(st.sampled_from([1.05, 4.0])),
        vespo_k_neg=draw(st.sampled_from([3.0, 1.0])),
        vespo_lambda_pos=draw(st.sampled_from([3.0, 0.5])),
        off_policy_mask=draw(st.sampled_from([None, 0.0, 0.2])),
        kl_unbiased=draw(st.booleans()),
        kl=draw(st.sampled_from(["k1", "k2", "k3"])),
        kl_coef=draw(st.sampled_from([0.0, 0.3])),
        entropy_coef=draw(st.sampled_from([0.0, 0.2, -0.1])),
        correction=draw(st.sampled_from(["none", "truncate", "mask"])),
        correction_floor=draw(st.sampled_from([0.0, 0.8])),
        correction_cap=1.1,
    )


@settings(deadline=None, max_examples=120)
@given(settings_of_the_loss(), st.integers(0, 2**20), st.booleans(), st.booleans())
def test_losses_and_gradients_are_the_textbook_s(
    options: LossOptions, seed: int, on_policy: bool, measures_all: bool
) -> None:
    """Of the reference in float64; and of what training computes from hidden states, in float32."""
    logits, given_ = arguments(options, seed)
    logits[0, V - 1] = 0.0  # autograd has no gradient at -inf
    if on_policy:
        given_["old_logprob"] = None
    if measures_all and options.off_policy_mask is not None:  # those without weight, too
        given_["sampled"] = torch.ones(N, dtype=torch.bool)
    given_ |= {name: x.float() for name, x in given_.items() if torch.is_tensor(x) and x.is_floating_point()}
    logits = logits.float()
    losses, gradient = textbook(logits, given_)
    with Float32Errors() as float32:
        found = reference.grpo_loss(logits, **given_)
    torch.testing.assert_close(found.loss, losses, atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(found.gradient, gradient, atol=1e-12, rtol=1e-10)
    assume(not float32.undecided)
    given_["cu_seqlens"] = CU_SEQLENS if options.per_sequence else None
    hidden = logits.requires_grad_()
    loss, metrics = grpo_kernels.linear_grpo_loss(hidden, torch.eye(V), **given_)
    assert_near(metrics.loss, found.loss)
    assert_near(torch.autograd.grad(loss, hidden)[0], found.gradient)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_logit_of_minus_infinity_is_a_token_less(options: LossOptions) -> None:
    """Against the textbook on the vocabulary without it."""
    logits, given_ = arguments(options, 0)
    logits[:, V - 1] = -torch.inf
    losses, gradient = textbook(logits[:, : V - 1], given_)
    found = reference.grpo_loss(logits, **given_)
    torch.testing.assert_close(found.loss, losses)
    torch.testing.assert_close(found.gradient[:, : V - 1], gradient)
    assert not found.gradient[:, V - 1].any()


def test_minus_infinity_is_a_probability_of_zero() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0], [-torch.inf, 7.0, -torch.inf]])
    log_p = reference.log_softmax(logits, 0.5)
    assert torch.equal(log_p.exp(), torch.tensor([[0.5, 0.0, 0.5], [0.0, 1.0, 0.0]], dtype=torch.float64))
    torch.testing.assert_close(reference.entropies(log_p), torch.tensor([2.0, 1.0], dtype=torch.float64).log())
