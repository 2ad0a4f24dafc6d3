"""The GRPO loss from logits and from hidden states against the float64 reference: all options, hostile rows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from float32_errors import ROUNDING, Float32Errors, assert_near
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import grpo_kernels
from grpo_kernels import LossOptions, Metrics, reference
from grpo_kernels.options import KINDS, SEQUENCE_KINDS
from grpo_kernels.token_loss import Tokens, token_losses

INF = math.inf
LOG_RATIOS = torch.tensor([0.0, 0.05, -0.05, 0.7, -0.7, 2.5, -2.5, 30.0, -30.0])
"""Away from every bound below, where float32 and float64 might decide differently."""


@st.composite
def losses(draw: st.DrawFn) -> LossOptions:
    kind = draw(st.sampled_from(KINDS))
    return LossOptions(
        kind=kind,
        clip_low=draw(st.sampled_from([0.1, 0.3, 0.99, 1.0, 10.0, INF])),
        clip_high=draw(st.sampled_from([0.1, 0.28, 5.0, 1e6, INF])),
        dual_clip=None if kind in ("cispo", "sapo", "gmpo", "vespo") else draw(st.sampled_from([None, 3.0])),
        tau_neg=draw(st.sampled_from([1.05, 5.0])),
        off_policy_mask=draw(st.sampled_from([None, 0.1234])),
        kl_unbiased=draw(st.booleans()),
        kl=draw(st.sampled_from(["k1", "k2", "k3"])),
        kl_coef=draw(st.sampled_from([0.0, 0.1])),
        entropy_coef=draw(st.sampled_from([0.0, 0.02, -0.3])),
        correction=draw(st.sampled_from(["none", "truncate", "mask"])),
        correction_floor=draw(st.sampled_from([0.0, 0.9])),
        correction_cap=1.5,
    )


def made_up(options: LossOptions, count: int, columns: int, seed: int, temperature: float) -> dict[str, Any]:
    """Arguments of a loss of `count` tokens, which the first `columns` of the logits decide."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count + 2, columns, generator=generator) * 3
    rows = torch.randperm(count + 2, generator=generator)[:count]
    ids = torch.randint(0, columns, (count,), generator=generator)
    exact = reference.log_softmax(logits[rows], temperature).gather(1, ids[:, None])[:, 0]
    log_ratio = LOG_RATIOS[torch.randint(0, len(LOG_RATIOS), (count,), generator=generator)]
    cuts = torch.randint(0, count + 1, (3,), generator=generator).sort().values
    cu_seqlens = torch.cat([torch.tensor([0]), cuts, torch.tensor([count])])
    if options.kind in SEQUENCE_KINDS:  # one ratio per sequence, the mean of tokens that differ
        sequence = torch.searchsorted(cu_seqlens[1:], torch.arange(count), right=True)
        log_ratio = LOG_RATIOS[(sequence + seed) % 7] + torch.zeros(count)
    old = (exact - log_ratio).float()
    weights = torch.rand(count, generator=generator) / count
    weights[torch.rand(count, generator=generator) < 0.2] = 0.0
    return {
        "logits": logits,
        "rows": rows,
        "ids": ids,
        "old_logprob": old,
        "ref_logprob": (exact + torch.randn(count, generator=generator)).float(),
        "advantages": torch.randn(count, generator=generator).round(decimals=1),
        "token_weight": weights,
        "rollout_logprob": old
        + torch.tensor([0.0, 0.3, -0.3, -1.0])[torch.randint(0, 4, (count,), generator=generator)],
        "cu_seqlens": cu_seqlens if options.per_sequence else None,
        "options": options,
        "temperature": temperature,
    }


def in_place(
    given_: dict[str, Any], padding: int = 3, factor: float = 1.0, **how: Any
) -> tuple[Tensor, Metrics, Tensor]:
    """Loss, metrics and gradient of logits in a wider buffer, NaN wherever nobody may read."""
    arguments = dict(given_)
    x = arguments.pop("logits")
    count, columns = x.shape
    storage = torch.full((count, columns + padding + 2), float("nan"))
    listed = arguments["rows"][arguments["token_weight"] != 0]
    storage[listed, :columns] = x[listed]
    logits = storage[:, : columns + padding].requires_grad_()
    loss, metrics = grpo_kernels.fused_grpo_loss(logits, vocab_size=columns, **arguments, **how)
    (gradient,) = torch.autograd.grad(loss * factor, logits)
    assert storage[:, columns + padding :].isnan().all(), "what lies between the rows was touched"
    assert not gradient[:, columns:].any(), "padding has a gradient"
    assert gradient.data_ptr() == logits.data_ptr(), "the gradient does not lie in place of the logits"
    return loss.detach(), metrics, gradient[:, :columns]


def exactly(arguments: dict[str, Any]) -> tuple[Any, Tensor]:
    """Results in float64 and the sum of the losses, with the errors of float32; discards what float32 may decide
    differently."""
    with Float32Errors() as float32:
        exact = reference.grpo_loss(**arguments)
        total = exact.loss.sum()
    assume(not float32.undecided)
    return exact, total


UNBIASED = {"kl_coef": 0.1, "kl_unbiased": True}


# Losses and gradients of which much is lost, where errors of ratios of e^30 nearly cancel or a log-prob is nearly 0.
@example(LossOptions(kind="sapo", kl="k2", tau_neg=5.0, **UNBIASED), 3, 9, 2060741179, 0.6)
@example(LossOptions(kind="sapo", kl="k1", **UNBIASED), 2, 28, 1866199417, 0.6)
@example(LossOptions(kind="cispo", kl="k3", **UNBIASED), 1, 9, 142853834, 0.6)
@example(LossOptions(kind="cispo", kl="k1", clip_high=1e6, **UNBIASED), 1, 12, 724507653, 1.0)
@settings(deadline=None, max_examples=150)
@given(losses(), st.integers(1, 12), st.integers(1, 40), st.integers(0, 2**31), st.sampled_from([1.0, 0.6, 2.0]))
def test_loss_and_gradient_of_logits(
    options: LossOptions, count: int, columns: int, seed: int, temperature: float
) -> None:
    arguments = made_up(options, count, columns, seed, temperature)
    exact, total = exactly(arguments)
    loss, metrics, gradient = in_place(arguments)
    assert_near(loss, total)
    assert_near(gradient, exact.gradient)
    counted = arguments["token_weight"] != 0
    assert_near(metrics.logprob[counted], exact.logprob[counted], exact.logprob.error[counted])


@settings(deadline=None, max_examples=60)
@given(losses(), st.integers(0, 150), st.integers(1, 40), st.integers(0, 2**31), st.sampled_from([64, None]))
def test_loss_and_gradients_of_hidden_states(
    options: LossOptions, count: int, columns: int, seed: int, chunk: int | None
) -> None:
    arguments = made_up(options, count, columns, seed, 0.8)
    x, rows = arguments.pop("logits"), arguments.pop("rows")
    exact, total = exactly({"logits": x[rows], **arguments})
    weight = torch.cat([torch.eye(columns), torch.full((2, columns), torch.nan)]).requires_grad_()
    hidden = x[rows].clone().requires_grad_()  # the logits, as the weight is the identity
    loss, metrics = grpo_kernels.linear_grpo_loss(hidden, weight, vocab_size=columns, chunk=chunk, **arguments)
    by_hidden, by_weight = torch.autograd.grad(loss, (hidden, weight))
    assert_near(loss, total)
    assert_near(by_hidden, exact.gradient)
    error = getattr(exact.gradient, "error", 0.0) + (count + 1) * ROUNDING * exact.gradient.abs()
    states = x[rows].double()
    assert_near(by_weight[:columns], exact.gradient.t() @ states, error.t() @ states.abs())
    assert not by_weight[columns:].any()
    assert metrics.tokens == (arguments["token_weight"] != 0).sum() or options.correction == "mask"


@settings(deadline=None)
@given(losses(), st.integers(0, 2**31))
def test_both_routes_log_the_same(options: LossOptions, seed: int) -> None:
    arguments = made_up(options, 9, 20, seed, 1.0)
    _, found, _ = in_place(arguments)
    x, rows = arguments.pop("logits"), arguments.pop("rows")
    with torch.no_grad():
        _, other = grpo_kernels.linear_grpo_loss(x[rows], torch.eye(20), **arguments)
    for name, value in vars(found).items():
        torch.testing.assert_close(
            value, getattr(other, name), atol=1e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@settings(deadline=None)
@given(losses(), st.integers(0, 2**31))
def test_on_policy_the_ratio_is_one(options: LossOptions, seed: int) -> None:
    options = replace(options, clip_low=0.0, clip_high=0.0)
    arguments = made_up(options, 9, 20, seed, 1.0) | {"old_logprob": None}
    arguments["rollout_logprob"] = (
        reference.grpo_loss(**arguments | {"rollout_logprob": torch.zeros(9)}).logprob.float() + 0.1
    )
    exact, total = exactly(arguments)
    loss, metrics, gradient = in_place(arguments)
    assert_near(loss, total)
    assert_near(gradient, exact.gradient)
    if metrics.tokens:
        assert metrics.ratio_min == metrics.ratio_max == 1
    assert metrics.clip_low == metrics.clip_high == metrics.clip_dual == metrics.kl_old == 0


def test_metrics_are_means_over_the_tokens_that_count() -> None:
    logits = torch.zeros(5, 4)
    uniform = torch.full((5,), -math.log(4.0))
    log_ratio = torch.tensor([math.log(3.0), math.log(0.5), math.log(10.0), 0.0, math.log(100.0)])
    loss, metrics = grpo_kernels.fused_grpo_loss(
        logits,
        torch.zeros(5, dtype=torch.int64),
        uniform - log_ratio,
        uniform - 0.2,
        torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0]),
        torch.tensor([0.25, 0.25, 0.25, 0.25, 0.0]),
        options=LossOptions(dual_clip=4.0, kl="k2"),
    )
    ratios = [3.0, 0.5, 10.0, 1.0]
    expected = {
        "tokens": 4.0,
        "clip_low": 0.25,
        "clip_high": 0.25,
        "clip_dual": 0.25,
        "kl": 0.02,
        "kl_old": sum(ratio - 1 - math.log(ratio) for ratio in ratios) / 4,
        "entropy": math.log(4.0),
        "ratio": sum(ratios) / 4,
        "ratio_min": 0.5,
        "ratio_max": 10.0,
    }
    for name, value in expected.items():
        found = getattr(metrics, name)
        assert found.dim() == 0
        assert found.dtype == torch.float32
        assert found.item() == pytest.approx(value, rel=1e-5), name
    assert loss.item() == pytest.approx((-1.2 + 0.8 + 4.0 - 1.0) / 4, rel=1e-6)


@pytest.mark.parametrize("old", [True, False])
def test_a_token_that_the_correction_masks_has_a_log_prob_all_the_same(old: bool) -> None:
    logits, uniform = torch.zeros(3, 4), torch.full((3,), -math.log(4.0))
    rollout = uniform - torch.tensor([0.0, 1.0, 0.0])
    vectors = (uniform if old else None, None, torch.ones(3), torch.tensor([0.5, 0.5, 0.0]))
    loss, metrics = grpo_kernels.fused_grpo_loss(
        logits, torch.arange(3), *vectors, options=LossOptions(correction="mask"), rollout_logprob=rollout
    )
    assert metrics.tokens == 1
    assert metrics.loss.tolist() == [-0.5, 0.0, 0.0]
    assert loss == -0.5
    torch.testing.assert_close(metrics.logprob, uniform * torch.tensor([1.0, 1.0, 0.0]))


def test_a_small_divergence_is_not_rounded_away() -> None:
    logprob, ones = torch.tensor([-2.0]), torch.ones(1)
    tokens = Tokens(advantage=ones, weight=ones, ref=torch.tensor([-2.0 - 2.0**-12]))
    found = token_losses(logprob, ones, tokens, LossOptions(kl="k3", kl_coef=1.0))
    assert found.kl.item() == pytest.approx(2.0**-25, rel=1e-2)


def single(target: float, old: float, advantage: float, options: LossOptions) -> tuple[float, Tensor]:
    """Loss and gradient of one token, whose logit is `target` beside two zeros; another token stands beside it."""
    logits = torch.tensor([[target, 0.0, 0.0], [1.0, 2.0, 3.0]], requires_grad=True)
    vectors = (torch.tensor([old, -1.0]), torch.tensor([-1.0, -1.0]), torch.tensor([advantage, 1.0]))
    loss, _ = grpo_kernels.fused_grpo_loss(
        logits, torch.tensor([0, 1]), *vectors, torch.tensor([1.0, 1e-9]), options=options
    )
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient[1].isfinite().all(), "another row was harmed"
    return loss.item(), gradient[0]


@pytest.mark.parametrize("kind", ["ppo", "cispo"])
def test_a_ratio_that_overflows_is_clipped_or_shows(kind: str) -> None:
    loss, gradient = single(5.0, -500.0, 2.0, LossOptions(kind=kind))
    assert math.isfinite(loss)
    assert gradient.isfinite().all()
    loss, gradient = single(5.0, -500.0, -2.0, LossOptions(dual_clip=3.0))
    assert loss == pytest.approx(6.0)
    assert not gradient.any()
    loss, _ = single(5.0, -500.0, -2.0, LossOptions())
    assert loss == INF, "an unbounded loss must show"


@pytest.mark.parametrize(("advantage", "expected"), [(1.0, 0.0), (-1.0, 0.8)])
def test_a_target_of_probability_zero_has_a_ratio_of_zero(advantage: float, expected: float) -> None:
    """Under cispo the loss is finite only without an advantage."""
    loss, gradient = single(-INF, -1.0, advantage, LossOptions())
    assert loss == pytest.approx(expected, abs=1e-6)
    assert not gradient.any()
    loss, gradient = single(-INF, -1.0, 0.0, LossOptions(kind="cispo"))
    assert loss == pytest.approx(0.0, abs=1e-6)
    assert not gradient.any()


@pytest.mark.parametrize(
    "options", [LossOptions(kind="cispo"), LossOptions(kl_coef=0.1), LossOptions(kl="k2", kl_coef=0.1)], ids=str
)
def test_where_a_target_of_probability_zero_has_no_finite_loss_that_shows(options: LossOptions) -> None:
    assert not math.isfinite(single(-INF, -1.0, 1.0, options)[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("everything", [False, True])
def test_masked_rows_may_hold_anything(kind: str, everything: bool) -> None:
    """Nothing is listed, or all of it is masked: `in_place` fills such rows with NaN."""
    options = LossOptions(kind=kind, kl_coef=0.1, entropy_coef=0.1)
    arguments = made_up(options, 8, 10, 3, 1.0)
    if everything:
        arguments["token_weight"] = torch.zeros(8)
    vectors = ("old_logprob", "ref_logprob", "advantages")
    for name in vectors:
        arguments[name][arguments["token_weight"] == 0] = torch.nan
    loss, metrics, gradient = in_place(arguments)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert bool(gradient.any()) != everything
    assert metrics.tokens == (arguments["token_weight"] != 0).sum()
    assert all(value.isfinite().all() for name, value in vars(metrics).items() if not name.startswith("ratio_m"))


def test_no_token_at_all() -> None:
    none = torch.zeros(0)
    logits = torch.ones(3, 4, requires_grad=True)
    nothing = torch.zeros(0, dtype=torch.int64)
    loss, metrics = grpo_kernels.fused_grpo_loss(
        logits, nothing, none, none, none, none, options=LossOptions(), rows=nothing
    )
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss == metrics.tokens == 0
    assert not gradient.any()


def test_the_incoming_factor_scales_the_gradient_once() -> None:
    arguments = made_up(LossOptions(), 6, 10, 0, 1.0)
    _, _, plain = in_place(arguments)
    _, _, scaled = in_place(arguments, factor=-2.5)
    torch.testing.assert_close(scaled, plain * -2.5)


def test_a_second_backward_pass_is_refused() -> None:
    arguments = made_up(LossOptions(), 6, 10, 0, 1.0)
    logits = arguments.pop("logits").requires_grad_()
    loss, _ = grpo_kernels.fused_grpo_loss(logits, **arguments)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="compute the loss again"):
        loss.backward()


def test_without_a_gradient_the_logits_stay() -> None:
    arguments = made_up(LossOptions(), 6, 10, 0, 1.0)
    logits = arguments.pop("logits")
    before = logits.clone()
    loss, _ = grpo_kernels.fused_grpo_loss(logits, **arguments)
    assert not loss.requires_grad
    with torch.no_grad():
        grpo_kernels.fused_grpo_loss(logits.requires_grad_(), **arguments)
    assert torch.equal(logits, before)


def test_autograd_notices_who_still_needed_the_logits() -> None:
    arguments = made_up(LossOptions(), 6, 10, 0, 1.0)
    squashed = arguments.pop("logits").requires_grad_().tanh()  # tanh's backward reads its result
    loss, _ = grpo_kernels.fused_grpo_loss(squashed, **arguments)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_logits_cost_only_their_own_rounding(dtype: torch.dtype) -> None:
    """Log-probs of rounded logits are exact; the gradient is rounded once, when it is stored."""
    arguments = made_up(LossOptions(entropy_coef=0.1), 8, 50, 0, 0.7)
    arguments["token_weight"] *= 8
    rounded = arguments.pop("logits").to(dtype)
    exact = reference.grpo_loss(rounded, **arguments)
    logits = rounded.clone().requires_grad_()
    loss, metrics = grpo_kernels.fused_grpo_loss(logits, **arguments)
    (gradient,) = torch.autograd.grad(loss, logits)
    counted = arguments["token_weight"] != 0
    torch.testing.assert_close(metrics.logprob[counted].double(), exact.logprob[counted], atol=1e-5, rtol=0.0)
    torch.testing.assert_close(gradient.double(), exact.gradient, rtol=torch.finfo(dtype).eps, atol=1e-6)
