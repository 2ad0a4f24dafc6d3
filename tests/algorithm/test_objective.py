"""The objective against the papers' formulas and their autograd in float64; clipping, NaN, refused input."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_mega.algorithm.objective import clipped_policy_loss, grpo_token_loss, kl_estimate

ESTIMATORS = ("k1", "k2", "k3")
BOUNDS = {"clip_low": 0.2, "clip_high": 0.28}
SETTINGS = {**BOUNDS, "dual_clip": 3.0, "kl_coef": 0.1, "kl_estimator": "k3"}


def naive_kl(logprob: Tensor, ref: Tensor, estimator: str) -> Tensor:
    ratio = torch.exp(ref - logprob)
    return {"k1": -torch.log(ratio), "k2": torch.log(ratio) ** 2 / 2, "k3": ratio - torch.log(ratio) - 1}[estimator]


def naive_policy_loss(logprob: Tensor, old: Tensor, advantage: Tensor, dual_clip: float | None) -> Tensor:
    ratio = torch.exp(logprob - old)
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    if dual_clip is not None:
        surrogate = torch.where(advantage < 0, torch.maximum(surrogate, dual_clip * advantage), surrogate)
    return -surrogate


def random_tokens(n: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logprob, old, ref = (-torch.rand(n, generator=generator, dtype=dtype) * 3 for _ in range(3))
    advantage = torch.randn(n, generator=generator, dtype=dtype)
    return logprob.requires_grad_(), old, ref, advantage


@pytest.mark.parametrize(
    ("dual_clip", "kl_coef", "estimator"), list(itertools.product([None, 1.5, 3.0], [0.0, 0.1], ESTIMATORS))
)
def test_loss_and_gradient_equal_the_formulas(dual_clip: float | None, kl_coef: float, estimator: str) -> None:
    logprob, old, ref, advantage = random_tokens(500, seed=1)
    expected = naive_policy_loss(logprob, old, advantage, dual_clip) + kl_coef * naive_kl(logprob, ref, estimator)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), logprob)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        x = logprob.detach().to(dtype).requires_grad_()
        loss, _ = grpo_token_loss(
            x,
            old.to(dtype),
            ref.to(dtype),
            advantage.to(dtype),
            **BOUNDS,
            dual_clip=dual_clip,
            kl_coef=kl_coef,
            kl_estimator=estimator,
        )
        (gradient,) = torch.autograd.grad(loss.sum(), x)
        assert loss.dtype == dtype
        torch.testing.assert_close(loss.double(), expected, atol=tolerance * 10, rtol=tolerance)
        torch.testing.assert_close(gradient.double(), expected_gradient, atol=tolerance * 10, rtol=tolerance)


@pytest.mark.parametrize("dual_clip", [None, 1.5])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradcheck(dual_clip: float | None, estimator: str) -> None:
    logprob, old, ref, advantage = random_tokens(40, seed=2)

    def loss(x: Tensor) -> Tensor:
        return grpo_token_loss(
            x, old, ref, advantage, **BOUNDS, dual_clip=dual_clip, kl_coef=0.2, kl_estimator=estimator
        )[0]

    assert torch.autograd.gradcheck(loss, (logprob,))


@given(
    log_ratio=st.floats(-3, 3),
    advantage=st.floats(-5, 5),
    low=st.floats(0, 0.9),
    high=st.floats(0, 2),
    dual_clip=st.none() | st.floats(1.01, 5),
)
@settings(max_examples=150)
def test_clip_is_reported_exactly_where_the_gradient_stops(
    log_ratio: float, advantage: float, low: float, high: float, dual_clip: float | None
) -> None:
    x = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    a = torch.tensor([advantage], dtype=torch.float64)
    loss, clipped = clipped_policy_loss(x, torch.zeros_like(a), a, low, high, dual_clip)
    (gradient,) = torch.autograd.grad(loss.sum(), x)
    if advantage == 0:
        assert not clipped.item()
        assert gradient.item() == 0
    elif clipped.item():
        assert gradient.item() == 0
    else:
        assert gradient.item() == loss.item() != 0
    if dual_clip is not None and advantage < 0:
        assert loss.item() <= dual_clip * -advantage * (1 + 1e-12)
    if dual_clip is None:  # clipping is pessimistic: it never lowers the loss
        assert loss.item() >= -advantage * math.exp(log_ratio) - 1e-9


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
    _, metrics = grpo_token_loss(
        torch.tensor([math.log(ratio)]), torch.zeros(1), torch.zeros(1), torch.tensor([advantage]), **SETTINGS
    )
    assert metrics["clip_fraction"].tolist() == [float(clipped)]
    assert metrics["ratio"].item() == pytest.approx(ratio, rel=1e-6)


def test_first_update_is_exactly_the_policy_gradient() -> None:
    logprob, _, ref, advantage = random_tokens(100, seed=3, dtype=torch.float32)
    loss, metrics = grpo_token_loss(
        logprob, logprob.detach(), ref, advantage, **BOUNDS, dual_clip=None, kl_coef=0.0, kl_estimator="k3"
    )
    loss.sum().backward()
    assert torch.equal(loss, -advantage)
    assert torch.equal(logprob.grad, -advantage)
    assert torch.equal(metrics["ratio"], torch.ones(100))
    assert metrics["clip_fraction"].sum() == metrics["approx_kl_old"].abs().sum() == 0


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_without_advantage_the_gradient_is_exactly_zero_even_when_the_ratio_overflows(dual_clip: float | None) -> None:
    logprob = torch.tensor([-0.1, -5.0, -1.0, -0.01], requires_grad=True)
    old = torch.tensor([-0.1, -1.0, -3.0, -500.0])
    loss, _ = grpo_token_loss(
        logprob, old, torch.zeros(4), torch.zeros(4), **BOUNDS, dual_clip=dual_clip, kl_coef=0.0, kl_estimator="k1"
    )
    loss.sum().backward()
    assert (loss == 0).all()
    assert (logprob.grad == 0).all()


def test_gradient_of_a_clipped_token_is_zero_when_its_ratio_overflows() -> None:
    logprob = torch.tensor([-0.01, -0.01], requires_grad=True)
    loss, clipped = clipped_policy_loss(logprob, torch.tensor([-500.0, -500.0]), torch.tensor([1.0, -1.0]), 0.2, 0.2, 3)
    loss.sum().backward()
    torch.testing.assert_close(loss.detach(), torch.tensor([-1.2, 3.0]))
    assert clipped.all()
    assert logprob.grad.tolist() == [0, 0]


def test_metrics_are_detached_and_kl_appears_only_with_a_coefficient() -> None:
    logprob, old, ref, advantage = random_tokens(30, seed=4)
    loss, metrics = grpo_token_loss(logprob, old.requires_grad_(), ref.requires_grad_(), advantage, **SETTINGS)
    assert set(metrics) == {"ratio", "clip_fraction", "approx_kl_old", "kl"}
    assert loss.requires_grad
    assert not any(value.requires_grad for value in metrics.values())
    assert all(value.shape == (30,) for value in metrics.values())
    _, metrics = grpo_token_loss(logprob, old, ref, advantage, **{**SETTINGS, "kl_coef": 0.0})
    assert set(metrics) == {"ratio", "clip_fraction", "approx_kl_old"}


def test_kl_to_the_old_policy_is_unbiased_over_tokens_the_old_policy_sampled() -> None:
    """Weighted with the old policy's probabilities the estimates add up to KL(old || policy)."""
    old, new = torch.log_softmax(torch.tensor([[2.0, 0.0, -1.0, 0.5], [0.0, 1.0, 0.0, 0.5]]).double(), dim=-1)
    _, metrics = grpo_token_loss(new, old, new, torch.ones(4).double(), **SETTINGS)
    kl = torch.nn.functional.kl_div(new, old, log_target=True, reduction="sum")
    torch.testing.assert_close((old.exp() * metrics["approx_kl_old"]).sum(), kl)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_estimators_are_unbiased(estimator: str) -> None:
    policy, ref = torch.log_softmax(torch.tensor([[2.0, 0.0, -1.0, 0.5], [0.0, 1.0, 0.0, 0.5]]).double(), dim=-1)
    kl = torch.nn.functional.kl_div(ref, policy, log_target=True, reduction="sum")
    torch.testing.assert_close((policy.exp() * kl_estimate(policy, ref, estimator)).sum(), kl)


def test_k3_keeps_its_digits_when_the_policies_nearly_agree() -> None:
    difference = torch.tensor([1e-3, -1e-3, 1e-2])
    torch.testing.assert_close(
        kl_estimate(difference, torch.zeros(3), "k3"), difference.square() / 2, rtol=1e-2, atol=0
    )


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("position", range(4))
def test_nan_in_any_input_is_nan_in_that_tokens_loss_only(position: int, advantage: float) -> None:
    tokens = [torch.full((3,), value) for value in (-1.0, -1.5, -2.0, advantage)]
    tokens[position][1] = math.nan
    loss, metrics = grpo_token_loss(*tokens, **SETTINGS)
    assert loss.isnan().tolist() == [False, True, False]
    if position < 2:
        assert metrics["ratio"].isnan().tolist() == [False, True, False]
        assert metrics["approx_kl_old"].isnan().tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip_low": 1.0}, "clip_low is 1.0"),
        ({"clip_low": -0.1}, "clip_low"),
        ({"clip_low": math.nan}, "clip_low"),
        ({"clip_high": -0.1}, "clip_high is -0.1"),
        ({"clip_high": math.nan}, "clip_high"),
        ({"dual_clip": 1.0}, "dual_clip is 1.0"),
        ({"kl_estimator": "k4"}, "'k4'; use k1, k2 or k3"),
    ],
)
def test_bad_settings_are_refused(change: dict, message: str) -> None:
    vector = torch.zeros(2)
    with pytest.raises(ValueError, match=message):
        grpo_token_loss(vector, vector, vector, vector, **{**SETTINGS, **change})


@pytest.mark.parametrize("position", range(4))
def test_vectors_that_would_broadcast_are_refused(position: int) -> None:
    tokens = [torch.zeros(3) for _ in range(4)]
    tokens[position] = torch.zeros(1)
    with pytest.raises(ValueError, match="of one shape"):
        grpo_token_loss(*tokens, **SETTINGS)
