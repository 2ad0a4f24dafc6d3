"""Estimates from n samples per problem: best of k, majority of k, and means with confidence intervals.

Pure functions of the rewards of a problem's samples. Estimates that depend on k are the exact expectation over all
subsets of k of the n samples, drawn without replacement, so it is unbiased for every k up to n.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Z = statistics.NormalDist().inv_cdf(0.975)
"""Half-width of a 95 % interval of the normal distribution, in standard deviations."""


@dataclass(frozen=True)
class Estimate:
    """A mean over problems with its 95 % confidence interval.

    Attributes:
        mean: The mean.
        low, high: Bounds of the interval; both None for a single problem.
        problems: Number of problems.
    """

    mean: float
    low: float | None
    high: float | None
    problems: int


def best_of(values: Sequence[float], k: int) -> float:
    """Expected largest value among k of n values.

    For values of 0 and 1 it is pass@k, 1 - C(n - c, k) / C(n, k) with c ones (Chen et al., 2021, arXiv 2107.03374,
    equation 1): of the C(n, k) subsets, those whose greatest is the i-th smallest value number C(i - 1, k - 1).

    Args:
        values: n values.
        k: From 1 to n.

    Raises:
        ValueError: k is outside 1 to n.
    """
    _check(k, len(values))
    subsets = math.comb(len(values), k)
    ranked = sorted(values)
    return math.fsum(ranked[i] * (math.comb(i, k - 1) / subsets) for i in range(k - 1, len(values)))


def preferred_of(values: Sequence[float], scores: Sequence[float], k: int) -> float:
    """Expected value of the highest-scored of k samples: best of k by a reward model (rm@k).

    Of the C(n, k) subsets, those whose highest score has one of the samples ranked i to j, whose scores are equal,
    number C(j, k) - C(i - 1, k); each of these is then taken with equal probability.

    Args:
        values: n values.
        scores: n scores.
        k: From 1 to n.

    Raises:
        ValueError: k is outside 1 to n.
    """
    _check(k, len(values))
    alike: dict[float, list[float]] = {}
    for score, value in sorted(zip(scores, values, strict=True)):
        alike.setdefault(score, []).append(value)
    expected, below, subsets = 0.0, 0, math.comb(len(values), k)
    for group in alike.values():
        ways = math.comb(below + len(group), k) - math.comb(below, k)
        expected += math.fsum(group) / len(group) * (ways / subsets)
        below += len(group)
    return expected


def majority_of(values: Sequence[float], votes: Sequence[int | None]) -> list[float]:
    """Expected value of the most frequent answer of k samples, for k = 1 ... n (maj@k).

    A sample votes for its answer; one without an answer does not vote. Each of several answers with equally many votes
    wins with equal probability; without any vote the value is 0. The value of an answer is the largest of its samples:
    an answer is right even if some samples gave it in a wrong format.

    For a winner with j votes, the samples with other answers are counted by a generating function, in which no answer
    has more than j votes and those with exactly j are counted.

    Args:
        values: n values.
        votes: For each sample the number of its answer, equal for equal answers, or None.

    Returns:
        [n] the expected values for k = 1 ... n.
    """
    n = len(values)
    answers = Counter(vote for vote in votes if vote is not None)
    silent = [math.comb(n - answers.total(), k) for k in range(n + 1)]
    weighted = np.zeros(n + 1)  # by k: sum over subsets of the winner's value
    for winner, most in answers.items():
        worth = max(value for value, vote in zip(values, votes, strict=True) if vote == winner)
        if not worth:
            continue
        others = [count for answer, count in answers.items() if answer != winner]
        for j in range(1, most + 1):
            ways = _subsets(others, j, n)
            wins = (ways / np.arange(1, len(ways) + 1)[:, None]).sum(0)  # t others are tied: it wins one time in t + 1
            wins = np.convolve(wins, silent)[: n + 1 - j]  # samples without an answer join any subset
            weighted[j:] += worth * math.comb(most, j) * wins
    return [float(weighted[k] / math.comb(n, k)) for k in range(1, n + 1)]


def _subsets(counts: Sequence[int], most: int, n: int) -> np.ndarray:
    """[t, s] number of subsets of s samples in which t answers have exactly `most` votes and none has more.

    Args:
        counts: Samples with each answer.
        most: At least 1.
        n: Largest s.
    """
    ways = np.zeros((1 + sum(count >= most for count in counts), n + 1))
    ways[0, 0] = 1
    for count in counts:
        longer = np.zeros_like(ways)
        for taken in range(min(most - 1, count) + 1):
            longer[:, taken:] += math.comb(count, taken) * ways[:, : n + 1 - taken]
        if count >= most:
            longer[1:, most:] += math.comb(count, most) * ways[:-1, : n + 1 - most]
        ways = longer
    return ways


def mean_over_problems(values: Sequence[float]) -> Estimate:
    """Mean of one value per problem, with the interval for the mean over all such problems.

    Values that are all 0 or 1, such as those of one sample per problem, have Wilson's interval (1927), which stays
    informative when all are equal. Others have the standard error of the mean over problems: a problem's samples are a
    cluster, whose mean is one independent observation (Miller, 2024, arXiv 2411.00640, section 2.2), so nothing needs
    to be resampled. It is cut at 0 and 1 when all values lie between.

    Args:
        values: One value per problem, at least one.

    Raises:
        ValueError: There are no values.
    """
    n = len(values)
    if not n:
        raise ValueError("there is no problem to estimate a mean over")
    mean = sum(values) / n  # summed as in training, so that results are equal
    if all(value in (0, 1) for value in values):
        return Estimate(mean, *wilson(round(sum(values)), n), n)
    if n == 1:
        return Estimate(mean, None, None, n)
    half = Z * statistics.stdev(values) / math.sqrt(n)
    within = all(0 <= value <= 1 for value in values)
    low, high = mean - half, mean + half
    return Estimate(mean, max(low, 0.0) if within else low, min(high, 1.0) if within else high, n)


def wilson(successes: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % score interval for a proportion: the p for which (successes / n - p)^2 <= Z^2 p (1 - p) / n.

    Args:
        successes: From 0 to n.
        n: At least 1.
    """
    share, z2 = successes / n, Z * Z
    center = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return (0.0 if successes == 0 else center - half), (1.0 if successes == n else center + half)


def sizes(samples: int) -> list[int]:
    """Values of k, from 2 on, for which pass@k and maj@k are reported: powers of two, and the number of samples."""
    powers = [1 << power for power in range(1, samples.bit_length())]
    return [*powers, *([samples] if samples > 1 and samples not in powers else [])]


def _check(k: int, n: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k={k} is outside 1 to {n}, the number of samples")
