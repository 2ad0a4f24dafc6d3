"""Group-relative advantages: the literature's worked examples, invariances, refused input."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mega.algorithm.advantage import group_advantages, has_signal

STDS = ("sample", "population", "none")
BASELINES = ("mean", "leave_one_out", "optimal")
distinct_rewards = st.lists(st.integers(-20, 20), min_size=2, max_size=16).filter(lambda r: len(set(r)) > 1)


def advantages(rewards: list[float], std: str) -> torch.Tensor:
    return group_advantages(torch.tensor(rewards, dtype=torch.float64), std)


@pytest.mark.parametrize(("std", "size"), [("sample", 0.866), ("population", 1.0), ("none", 0.5)])
def test_two_of_four_correct(std: str, size: float) -> None:
    expected = torch.tensor([size, -size, size, -size])
    torch.testing.assert_close(advantages([1, 0, 1, 0], std), expected, atol=5e-4, rtol=0)


def test_five_of_eight_correct() -> None:
    got = advantages([1, 1, 0, 1, 0, 1, 0, 1], "population")
    expected = torch.tensor([0.77, 0.77, -1.29, 0.77, -1.29, 0.77, -1.29, 0.77])
    torch.testing.assert_close(got, expected, atol=5e-3, rtol=0)


@given(
    reward=st.floats(-1e6, 1e6),
    size=st.integers(2, 33),
    std=st.sampled_from(STDS),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_equal_rewards_give_exactly_zero(reward: float, size: int, std: str, dtype: torch.dtype) -> None:
    got = group_advantages(torch.full((size,), reward, dtype=dtype), std)
    assert got.dtype == torch.float32
    assert torch.equal(got, torch.zeros(size))


@pytest.mark.parametrize("std", ["sample", "population"])
def test_rounding_between_rewards_stays_tiny(std: str) -> None:
    assert advantages([0.1 + 0.2, 0.3, 0.3, 0.3], std).abs().max() < 1e-9


def rounded(reward: float, ulps: int) -> float:
    """So many units in the last place of float32 above a positive reward."""
    bits = torch.tensor(reward, dtype=torch.float32).view(torch.int32) + ulps
    return float(bits.view(torch.float32))


@given(
    reward=st.floats(1e-30, 1e30),
    ulps=st.lists(st.integers(0, 8), min_size=2, max_size=8),
    sign=st.sampled_from([1, -1]),
    std=st.sampled_from(["sample", "population", "batch", "batch_rewards"]),
)
def test_divided_rewards_that_differ_in_their_last_bits_are_equal_whatever_their_size(
    reward: float, ulps: list[int], sign: int, std: str
) -> None:
    rewards = [sign * rounded(reward, n) for n in ulps]
    assert not advantages(rewards, std).any()
    assert not has_signal(rewards, std)


@given(rewards=st.lists(st.integers(-4, 4), min_size=2, max_size=8), size=st.floats(1e-20, 1e20))
def test_where_nothing_divides_any_difference_counts(rewards: list[int], size: float) -> None:
    """Here of a few units in the last place of float64, which the rewards' mean would round away."""
    rewards = [size + r * math.ulp(size) for r in rewards]
    mean = sum(map(Fraction, rewards)) / len(rewards)
    expected = [float(Fraction(r) - mean) for r in rewards]
    assert advantages(rewards, "none").tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9 * math.ulp(size))
    assert has_signal(rewards, "none") == (len({*rewards}) > 1)


def test_a_reward_of_a_million_and_one_is_better_than_a_million() -> None:
    assert advantages([1e6, 1e6 + 1], "none").tolist() == [-0.5, 0.5]
    assert not advantages([1e6, 1e6 + 1], "sample").any()


def test_a_reward_of_a_hundred_that_was_rounded_is_no_signal() -> None:
    assert not group_advantages(torch.tensor([100, 100.00001, 100, 100]), "sample").any()
    assert advantages([100, 100.001, 100, 100], "sample").tolist() == pytest.approx([-0.5, 1.5, -0.5, -0.5])


@given(rewards=distinct_rewards, std=st.sampled_from(["sample", "population"]), exponent=st.integers(-36, 36))
def test_advantages_do_not_depend_on_the_unit_of_the_rewards(rewards: list[int], std: str, exponent: int) -> None:
    scaled = advantages([r * 10.0**exponent for r in rewards], std)
    torch.testing.assert_close(scaled, advantages(rewards, std), atol=1e-6, rtol=1e-5)


@given(rewards=distinct_rewards, shift=st.integers(-(10**6), 10**6), std=st.sampled_from(STDS))
def test_advantages_do_not_depend_on_a_shift_that_leaves_differences_visible(
    rewards: list[int], shift: int, std: str
) -> None:
    shifted = [r + shift for r in rewards]
    if std == "none" or max(shifted) - min(shifted) > 1e-6 * max(map(abs, shifted)):
        torch.testing.assert_close(advantages(shifted, std), advantages(rewards, std), atol=1e-6, rtol=1e-5)


@given(
    rewards=st.lists(st.floats(0, 1e6), min_size=2, max_size=8),
    apart=st.sampled_from([1.0, 1e-3, 1e-20, 1e-43]),
    sign=st.sampled_from([1, -1]),
    std=st.sampled_from(STDS),
    baseline=st.sampled_from(BASELINES),
)
def test_a_group_has_a_signal_where_it_has_an_advantage(
    rewards: list[float], apart: float, sign: int, std: str, baseline: str
) -> None:
    """Also where all rewards are nearly the first one, or as small as float32 can be."""
    rewards = [sign * (rewards[0] + (r - rewards[0]) * apart) for r in rewards]
    got = group_advantages(torch.tensor(rewards, dtype=torch.float64), std, baseline, range(1, len(rewards) + 1))
    assert got.isfinite().all()
    assert bool(got.any()) == has_signal(rewards, std)


@given(rewards=distinct_rewards, std=st.sampled_from(STDS), data=st.data())
@settings(max_examples=60)
def test_invariances(rewards: list[int], std: str, data: st.DataObject) -> None:
    got = advantages(rewards, std)
    assert got.dtype == torch.float32
    assert abs(got.double().mean().item()) < 1e-6 * max(map(abs, rewards))

    shift = data.draw(st.integers(-1000, 1000))
    torch.testing.assert_close(advantages([r + shift for r in rewards], std), got, atol=1e-6, rtol=1e-6)

    scale = data.draw(st.floats(0.1, 1000))
    expected = got * scale if std == "none" else got
    torch.testing.assert_close(advantages([r * scale for r in rewards], std), expected, atol=1e-6, rtol=1e-4)

    order = data.draw(st.permutations(range(len(rewards))))
    torch.testing.assert_close(advantages([rewards[i] for i in order], std), got[list(order)], atol=1e-7, rtol=1e-6)


@given(rewards=distinct_rewards)
@settings(max_examples=30)
def test_divided_by_the_standard_deviation_they_have_unit_variance(rewards: list[int]) -> None:
    for std, correction in (("sample", 1), ("population", 0)):
        assert advantages(rewards, std).double().var(correction=correction).item() == pytest.approx(1, abs=1e-4)


def test_integer_rewards_are_accepted() -> None:
    assert group_advantages(torch.tensor([3, 1]), "none").tolist() == [1.0, -1.0]


@pytest.mark.parametrize("rewards", [[1.0], [], [[1.0, 0.0], [0.0, 1.0]]])
def test_what_is_no_group_is_refused(rewards: list) -> None:
    with pytest.raises(ValueError, match="at least 2"):
        group_advantages(torch.tensor(rewards), "sample")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e39])
def test_rewards_that_are_not_finite_are_refused(bad: float) -> None:
    for rewards in ([1.0, bad], [bad, bad]):
        with pytest.raises(ValueError, match="finite"):
            advantages(rewards, "sample")


def test_unknown_standard_deviation_is_refused_even_for_equal_rewards() -> None:
    with pytest.raises(ValueError, match="'biased'; use one of sample, population, mean, none"):
        advantages([1, 1], "biased")
    with pytest.raises(ValueError, match="'median'; use mean, leave_one_out or optimal"):
        group_advantages(torch.ones(2), "none", "median")


def test_leave_one_out_as_in_rloo() -> None:
    """Each reward less the mean of the others."""
    got = group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), "none", "leave_one_out")
    torch.testing.assert_close(got, torch.tensor([1.0, -1 / 3, -1 / 3, -1 / 3]))


@given(rewards=distinct_rewards)
def test_leave_one_out_is_the_centred_reward_but_for_a_factor(rewards: list[int]) -> None:
    g = len(rewards)
    got = group_advantages(torch.tensor(rewards), "none", "leave_one_out").double()
    by_hand = [r - (sum(rewards) - r) / (g - 1) for r in rewards]
    torch.testing.assert_close(got, torch.tensor(by_hand).double(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got, advantages(rewards, "none").double() * g / (g - 1), atol=1e-5, rtol=1e-5)


@given(rewards=distinct_rewards, data=st.data())
def test_the_optimal_baseline_weighs_rewards_by_length(rewards: list[int], data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 500), min_size=len(rewards), max_size=len(rewards)))
    baseline = sum(length * r for length, r in zip(lengths, rewards, strict=True)) / sum(lengths)
    got = group_advantages(torch.tensor(rewards), "none", "optimal", lengths).double()
    torch.testing.assert_close(got, torch.tensor([r - baseline for r in rewards]).double(), atol=1e-4, rtol=1e-5)
    equal = group_advantages(torch.tensor(rewards), "none", "optimal", [7] * len(rewards))
    torch.testing.assert_close(equal, advantages(rewards, "none"), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lengths", [[], [1], [0, 0], [3, -1]])
def test_lengths_that_do_not_weigh_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="each of the 2 rewards needs one, and not all 0"):
        group_advantages(torch.tensor([0.0, 1.0]), "none", "optimal", lengths)


@given(size=st.integers(2, 64), data=st.data())
def test_divided_by_the_mean_right_samples_share_one_gradient(size: int, data: st.DataObject) -> None:
    """MaxRL: the mean of A times the score is the mean score of the right ones less that of all."""
    right = data.draw(st.integers(1, size - 1))
    rewards = [1.0] * right + [0.0] * (size - right)
    expected = [size / right - 1] * right + [-1.0] * (size - right)
    assert advantages(rewards, "mean").tolist() == pytest.approx(expected, rel=1e-6)


@given(rewards=st.lists(st.integers(0, 20), min_size=2, max_size=9).filter(lambda r: len(set(r)) > 1))
def test_divided_by_the_mean_of_any_rewards(rewards: list[int]) -> None:
    mean = sum(rewards) / len(rewards)
    assert advantages(rewards, "mean").tolist() == pytest.approx([r / mean - 1 for r in rewards], abs=1e-6)


def test_divided_by_the_mean_nothing_right_is_no_signal_and_a_negative_reward_is_refused() -> None:
    assert not advantages([0, 0, 0], "mean").any()
    with pytest.raises(ValueError, match="are not all positive or 0, as advantage_std=mean needs them"):
        advantages([1, -1], "mean")


@given(reward=st.floats(0, 1e6), size=st.integers(2, 9), baseline=st.sampled_from(BASELINES))
def test_equal_rewards_give_exactly_zero_with_every_baseline(reward: float, size: int, baseline: str) -> None:
    for std in (*STDS, "mean"):
        assert not group_advantages(torch.full((size,), reward).double(), std, baseline, range(1, size + 1)).any()


def test_fewer_than_two_rewards_are_no_signal() -> None:
    for std in ("none", "sample"):
        assert not has_signal([], std)
        assert not has_signal([1.0], std)
