"""The loss of a token as people read the papers: which bound binds, what an estimate means."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from grpo_kernels import LossOptions
from grpo_kernels.token_loss import TokenLosses, Tokens, token_losses

POLICY, OTHER = torch.log_softmax(torch.tensor([[2.0, 0.0, -1.0, 0.5], [0.0, 1.0, 0.0, 0.5]]).double(), dim=-1)


def found(logprob: Tensor, advantage: Tensor, options: LossOptions, **known: Tensor) -> TokenLosses:
    return token_losses(
        logprob, torch.zeros_like(logprob), Tokens(advantage, torch.ones_like(logprob), **known), options
    )


@given(
    log_ratio=st.floats(-3, 3),
    advantage=st.floats(-5, 5, allow_subnormal=False),  # times a ratio it would be 0
    low=st.floats(0, 0.9) | st.sampled_from([1.0, 10.0, math.inf]),
    high=st.floats(0, 2) | st.just(math.inf),
    dual_clip=st.none() | st.floats(1.01, 5),
)
def test_a_clip_is_reported_exactly_where_the_gradient_stops(
    log_ratio: float, advantage: float, low: float, high: float, dual_clip: float | None
) -> None:
    x, a = torch.tensor([log_ratio], dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    token = found(x, a, LossOptions(clip_low=low, clip_high=high, dual_clip=dual_clip), old=torch.zeros_like(a))
    loss, gradient = token.loss.item(), token.grad_logprob.item()
    if advantage == 0:
        assert token.clipped.item() == 0
        assert gradient == 0
    elif token.clipped.item():
        assert gradient == 0
    else:
        assert gradient == loss != 0
    if dual_clip is not None and advantage < 0:
        assert loss <= dual_clip * -advantage * (1 + 1e-12)
    if dual_clip is None:  # clipping is pessimistic: it never lowers the loss
        assert loss >= -advantage * math.exp(log_ratio) - 1e-9


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [
        (1.5, 1.0, True),
        (1.1, 1.0, False),
        (0.1, 1.0, False),
        (9.0, 0.0, False),
        (0.1, 0.0, False),
        (0.5, -1.0, True),
        (0.9, -1.0, False),
        (2.0, -1.0, False),
        (4.0, -1.0, True),
    ],
)
def test_which_bound_binds(ratio: float, advantage: float, clipped: bool) -> None:
    options = LossOptions(clip_high=0.28, dual_clip=3.0)
    token = found(torch.tensor([math.log(ratio)]), torch.tensor([advantage]), options, old=torch.zeros(1))
    assert (token.clipped != 0).tolist() == [clipped]
    assert token.log_ratio.exp().item() == pytest.approx(ratio, rel=1e-6)


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo"])
@pytest.mark.parametrize("clip_low", [1.0, 10.0, math.inf])
def test_from_one_on_there_is_no_bound_below(kind: str, clip_low: float) -> None:
    log_ratio, advantage = torch.tensor([-1e-3, -5.0, -80.0]).double(), -torch.ones(3).double()
    options = LossOptions(kind=kind, clip_low=clip_low, clip_high=10.0)
    ends = {"cu_seqlens": torch.arange(4)} if kind == "gspo" else {}
    token = found(log_ratio, advantage, options, old=torch.zeros(3).double(), **ends)
    assert not token.clipped.any()
    torch.testing.assert_close(token.grad_logprob, log_ratio.exp())
    assert (token.grad_logprob > 0).all()


@pytest.mark.parametrize("kind", ["ppo", "cispo"])
@pytest.mark.parametrize(("clip_high", "bound"), [(10.0, 11.0), (math.inf, math.exp(60))])
def test_a_wide_bound_above_lets_large_ratios_through(kind: str, clip_high: float, bound: float) -> None:
    log_ratio = torch.tensor([2.0, 60.0]).double()
    options = LossOptions(kind=kind, clip_high=clip_high)
    token = found(log_ratio, torch.ones(2).double(), options, old=torch.zeros(2).double())
    assert token.clipped.tolist() == [0, 2 if clip_high == 10 else 0]
    held = -bound if kind == "cispo" or clip_high == math.inf else 0.0
    assert token.grad_logprob.tolist() == pytest.approx([-math.exp(2), held])


@pytest.mark.parametrize("kind", ["ppo", "cispo", "sapo"])
def test_the_first_update_is_exactly_the_policy_gradient(kind: str) -> None:
    generator = torch.Generator().manual_seed(3)
    logprob, advantage = -torch.rand(100, generator=generator), torch.randn(100, generator=generator)
    token = found(logprob, advantage, LossOptions(kind=kind))
    torch.testing.assert_close(token.grad_logprob, -advantage, atol=0, rtol=1e-6 if kind == "sapo" else 0)
    assert not token.clipped.any()
    assert not token.log_ratio.any()


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_without_advantage_nothing_moves_even_when_the_ratio_overflows(dual_clip: float | None) -> None:
    logprob, old = torch.tensor([-0.1, -5.0, -1.0, -0.01]), torch.tensor([-0.1, -1.0, -3.0, -500.0])
    token = found(logprob, torch.zeros(4), LossOptions(dual_clip=dual_clip), old=old)
    assert not token.loss.any()
    assert not token.grad_logprob.any()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_estimates_are_unbiased_over_tokens_the_policy_sampled(estimator: str) -> None:
    token = found(POLICY, torch.zeros_like(POLICY), LossOptions(kl=estimator), ref=OTHER)
    kl = torch.nn.functional.kl_div(OTHER, POLICY, log_target=True, reduction="sum")
    torch.testing.assert_close((POLICY.exp() * token.kl).sum(), kl)


@pytest.mark.parametrize("kind", ["ppo", "cispo", "sapo"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("position", range(4))
def test_nan_in_any_input_is_nan_in_that_token_s_loss_only(
    position: int, advantage: float, kl_coef: float, kind: str
) -> None:
    logprob, old, ref, advantages = vectors = [torch.full((3,), x) for x in (-1.0, -1.5, -2.0, advantage)]
    vectors[position][1] = math.nan
    options = LossOptions(kind=kind, dual_clip=3.0 if kind == "ppo" else None, kl_coef=kl_coef)
    token = found(logprob, advantages, options, old=old, ref=ref)
    read = position != 2 or kl_coef > 0
    assert token.loss.isnan().tolist() == [False, read, False]


@given(log_ratio=st.floats(-50, 500), advantage=st.floats(-5, 5), tau=st.floats(0.1, 10))
def test_sapo_never_has_a_larger_gradient_than_on_policy_and_always_a_finite_one(
    log_ratio: float, advantage: float, tau: float
) -> None:
    """The gate's derivative is 1 where the ratio is, and falls to both sides (4 p (1 - p) is at most 1)."""
    x, a = torch.tensor([[log_ratio], [advantage]], dtype=torch.float64)
    token = found(x, a, LossOptions(kind="sapo", tau_pos=tau, tau_neg=tau), old=torch.zeros_like(a))
    assert token.grad_logprob.isfinite()
    assert token.grad_logprob.abs().item() <= abs(advantage) * math.exp(min(log_ratio, 700)) * (1 + 1e-9)
    assert token.loss.item() * advantage <= 0


def test_sapo_weakens_negative_advantages_faster() -> None:
    """Its temperature is the higher one."""
    ratio = torch.tensor([1.5, 1.5]).double()
    token = found(
        ratio.log(), torch.tensor([1.0, -1.0]).double(), LossOptions(kind="sapo"), old=torch.zeros(2).double()
    )
    rising, falling = token.grad_logprob.abs().tolist()
    assert falling < rising < 1.5


def test_an_estimate_times_the_ratio_has_the_gradient_of_the_divergence_whoever_sampled() -> None:
    """Over the old policy's tokens: the sum over x of old(x) (pi / old) (k + k') d log pi is the gradient of the KL."""
    logits = torch.tensor([2.0, 0.0, -1.0, 0.5]).double().requires_grad_()
    old = torch.log_softmax(torch.tensor([1.0, 1.0, 0.0, 0.0]).double(), -1)
    policy = torch.log_softmax(logits, -1)
    (exact,) = torch.autograd.grad(torch.nn.functional.kl_div(OTHER, policy, log_target=True, reduction="sum"), logits)
    for estimator in ("k1", "k3"):
        options = LossOptions(kl=estimator, kl_coef=1.0, kl_unbiased=True)
        token = found(policy.detach(), torch.zeros(4).double(), options, old=old, ref=OTHER)
        policy = torch.log_softmax(logits, -1)
        (gradient,) = torch.autograd.grad(policy, logits, old.exp() * token.grad_logprob)
        torch.testing.assert_close(gradient, exact)


def test_the_geometric_mean_of_clipped_ratios() -> None:
    """GMPO with two tokens, of which one is clipped: the sequence's ratio is the square root of the product."""
    ratio, a = torch.tensor([1.1, 9.0]).double(), torch.ones(2).double()
    options = LossOptions(kind="gmpo", clip_low=0.3, clip_high=0.5)
    token = found(ratio.log(), a, options, old=torch.zeros(2).double(), cu_seqlens=torch.tensor([0, 2]))
    expected = -((1.1 * 1.5) ** 0.5)
    assert token.loss.tolist() == pytest.approx([expected] * 2)
    assert token.clipped.tolist() == [0, 2]
    assert token.grad_logprob.tolist() == pytest.approx([expected, 0.0])


def test_vespo_weighs_a_sequence_by_the_product_of_its_ratios() -> None:
    """Two tokens whose ratios are 1.1 and 1.5: rho = 1.65, for a positive and for a negative advantage."""
    ratio, rho = torch.tensor([1.1, 1.5] * 2).double(), 1.1 * 1.5
    advantage, ends = torch.tensor([2.0, 2.0, -2.0, -2.0]).double(), torch.tensor([0, 2, 4])
    token = found(ratio.log(), advantage, LossOptions(kind="vespo"), old=torch.zeros(4).double(), cu_seqlens=ends)
    rises, falls = rho**2 * math.exp(3 * (1 - rho)), rho**3 * math.exp(2 * (1 - rho))
    assert token.grad_logprob.tolist() == pytest.approx([-2 * rises] * 2 + [2 * falls] * 2)
    torch.testing.assert_close(token.loss, token.grad_logprob * ratio.log())


# Numbers below the smallest normal one are too coarse for the bound's 1e-9.
@given(st.floats(-1e4, 1e4), st.floats(-3, 3, allow_subnormal=False), st.floats(0.5, 5), st.floats(0.5, 5))
def test_vespo_s_factor_is_1_on_policy_and_bounded_by_its_peak(apart: float, a: float, k: float, rate: float) -> None:
    options = LossOptions(kind="vespo", vespo_k_pos=k, vespo_lambda_pos=rate, vespo_k_neg=k, vespo_lambda_neg=rate)
    x, advantage = torch.tensor([[apart, 0.0], [a, a]], dtype=torch.float64)
    ends = torch.tensor([0, 1, 2])
    far, near = found(x, advantage, options, old=torch.zeros_like(x), cu_seqlens=ends).grad_logprob.tolist()
    assert near == pytest.approx(-a)
    assert abs(far) <= abs(a) * (k / rate) ** k * math.exp(rate - k) * (1 + 1e-9)


def test_under_gspo_token_an_advantage_moves_its_own_token_alone() -> None:
    logprob, ends = torch.tensor([0.1, -0.1, 0.3]).double(), torch.tensor([0, 3])
    advantage = torch.tensor([1.0, 0.0, -2.0]).double()
    options = LossOptions(kind="gspo_token", clip_low=1.0, clip_high=math.inf)
    token = found(logprob, advantage, options, old=torch.zeros(3).double(), cu_seqlens=ends)
    ratio = math.exp(0.1)
    assert token.grad_logprob.tolist() == pytest.approx([-ratio, 0.0, 2 * ratio])


@given(st.floats(-3, 3), st.floats(-3, 3))
def test_gspo_token_is_gspo_where_all_advantages_of_a_sequence_are_equal(first: float, second: float) -> None:
    logprob, ends = torch.tensor([first, second], dtype=torch.float64), torch.tensor([0, 2])
    gspo, of_token = (
        found(logprob, torch.ones(2).double(), LossOptions(kind=kind), old=torch.zeros(2).double(), cu_seqlens=ends)
        for kind in ("gspo", "gspo_token")
    )
    torch.testing.assert_close(gspo.grad_logprob, of_token.grad_logprob)
    torch.testing.assert_close(gspo.loss, of_token.loss)


def test_the_off_policy_mask_takes_negative_advantages_of_sequences_that_became_unlikely() -> None:
    """DeepSeek-V3.2: mean of log(sampled / policy) 0.5, 0.1 and 0.5; the last has a positive advantage."""
    rollout = torch.zeros(6).double()
    logprob = torch.tensor([-0.9, -0.1, -0.1, -0.1, -0.9, -0.1]).double()
    advantage = torch.tensor([-1.0, -1.0, -1.0, -1.0, 1.0, 1.0]).double()
    options, ends = LossOptions(off_policy_mask=0.3, clip_low=0.99), torch.tensor([0, 2, 4, 6])
    token = found(logprob, advantage, options, old=rollout, rollout=rollout, cu_seqlens=ends)
    assert (token.loss != 0).tolist() == [False, False, True, True, True, True]
    assert (token.grad_logprob != 0).tolist() == [False, False, True, True, True, True]
