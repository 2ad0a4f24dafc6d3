"""Estimates from several samples per problem equal what enumerating all subsets gives."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.evaluate.estimates import Z, best_of, majority_of, mean_over_problems, preferred_of, sizes, wilson

VALUES = st.lists(st.sampled_from([0.0, 0.25, 1.0, -0.5]), min_size=1, max_size=8)


def chen(n: int, c: int, k: int) -> float:
    """Numerically stable pass@k as the paper prints it (figure 3 of arXiv 2107.03374)."""
    return 1.0 if n - c < k else 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def majority_by_enumeration(values: Sequence[float], votes: Sequence[int | None], k: int) -> Fraction:
    worth = {vote: max(v for v, w in zip(values, votes, strict=True) if w == vote) for vote in votes}
    total = Fraction(0)
    for subset in combinations(range(len(values)), k):
        counts = Counter(votes[i] for i in subset if votes[i] is not None)
        winners = [answer for answer, count in counts.items() if count == max(counts.values())]
        if winners:
            total += sum(Fraction(worth[answer]) for answer in winners) / len(winners)
    return total / math.comb(len(values), k)


@given(st.integers(1, 256), st.data())
def test_the_best_of_zeros_and_ones_is_pass_at_k_of_the_paper(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    assert best_of([1.0] * c + [0.0] * (n - c), k) == pytest.approx(chen(n, c, k), abs=1e-12)


@given(VALUES, st.data())
def test_the_best_of_k_is_the_mean_over_all_subsets(values: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(values)))
    best = [max(subset) for subset in combinations(values, k)]
    assert best_of(values, k) == pytest.approx(math.fsum(best) / len(best), abs=1e-12)


@given(VALUES, st.data())
def test_the_majority_of_k_is_the_mean_over_all_subsets(values: list[float], data: st.DataObject) -> None:
    answers = st.sampled_from([None, 0, 1, 2, 3])
    votes = data.draw(st.lists(answers, min_size=len(values), max_size=len(values)))
    found = majority_of(values, votes)
    expected = [float(majority_by_enumeration(values, votes, k)) for k in range(1, len(values) + 1)]
    assert found == pytest.approx(expected, abs=1e-12)


@given(VALUES, st.data())
def test_the_preferred_of_k_is_the_mean_over_all_subsets(values: list[float], data: st.DataObject) -> None:
    """Of several with the highest score each is taken with equal probability."""
    scores = data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=len(values), max_size=len(values)))
    k = data.draw(st.integers(1, len(values)))
    total = Fraction(0)
    for subset in combinations(range(len(values)), k):
        best = [i for i in subset if scores[i] == max(scores[j] for j in subset)]
        total += sum(Fraction(values[i]) for i in best) / len(best)
    assert preferred_of(values, scores, k) == pytest.approx(float(total / math.comb(len(values), k)))


def test_a_tie_is_won_by_each_with_equal_probability_and_no_vote_is_worth_nothing() -> None:
    assert majority_of([1.0, 0.0], [0, 1]) == [0.5, 0.5]
    assert majority_of([1.0, 0.0, 0.0], [0, 1, 2])[-1] == pytest.approx(1 / 3)
    assert majority_of([1.0, 1.0], [None, None]) == [0.0, 0.0]
    assert majority_of([1.0, 0.0, 0.0], [0, 0, 1])[-1] == 1.0, "the same answer in a wrong format votes for it too"


def test_the_largest_number_of_samples_is_exact() -> None:
    """256 different answers, one of which is right: the winner is any of those drawn."""
    values = [1.0] + [0.0] * 255
    assert majority_of(values, range(256)) == pytest.approx([1 / 256] * 256, abs=1e-12)
    half = majority_of([1.0] * 128 + [0.0] * 128, [0] * 128 + [1] * 128)
    assert half == pytest.approx([0.5] * 256, abs=1e-12)


def test_a_k_above_the_samples_is_named() -> None:
    with pytest.raises(ValueError, match="k=3"):
        preferred_of([0.0, 1.0], [1.0, 2.0], 3)
    with pytest.raises(ValueError, match="k=3"):
        best_of([0.0, 1.0], 3)


@given(st.integers(1, 500), st.data())
def test_the_ends_of_wilsons_interval_are_the_proportions_at_z_standard_errors(n: int, data: st.DataObject) -> None:
    c = data.draw(st.integers(0, n))
    low, high = wilson(c, n)
    assert 0 <= low <= c / n <= high <= 1
    for p in (low, high):
        assert (c / n - p) ** 2 == pytest.approx(Z * Z * p * (1 - p) / n, abs=1e-12)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30))
def test_the_interval_of_other_values_is_the_standard_error_over_problems(values: list[float]) -> None:
    estimate = mean_over_problems(values)
    assert estimate.mean == pytest.approx(np.mean(values))
    if not set(values) <= {0.0, 1.0}:
        half = 1.959963984540054 * np.std(values, ddof=1) / math.sqrt(len(values))
        assert estimate.low == pytest.approx(max(0.0, np.mean(values) - half), abs=1e-12)
        assert estimate.high == pytest.approx(min(1.0, np.mean(values) + half), abs=1e-12)


def test_what_one_problem_says_of_others() -> None:
    assert mean_over_problems([0.5]).low is None
    assert mean_over_problems([1.0]).low == pytest.approx(1 / (1 + Z * Z)), "one success is not certainty"
    assert mean_over_problems([12.0, 30.0]).high > 30, "lengths are not cut at 1"
    with pytest.raises(ValueError, match="no problem"):
        mean_over_problems([])


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Problems of different difficulty, eight samples each: about 95 % of the intervals hold the mean difficulty."""
    generator = np.random.default_rng(0)
    held = 0
    for _ in range(2000):
        difficulty = generator.beta(2, 3, size=60)
        estimate = mean_over_problems([float(x) for x in generator.binomial(8, difficulty) / 8])
        held += estimate.low <= 0.4 <= estimate.high
    assert 0.93 < held / 2000 < 0.965


@pytest.mark.parametrize(("samples", "expected"), [(1, []), (2, [2]), (6, [2, 4, 6]), (16, [2, 4, 8, 16])])
def test_sizes(samples: int, expected: list[int]) -> None:
    assert sizes(samples) == expected
