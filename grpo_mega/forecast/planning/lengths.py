"""Lengths of answers that are assumed before a run: how many, and how they differ.

Lengths of answers have long tails: most are short, a few reach the limit. A log-normal distribution that is cut at the
limit has both. Which mean it has is the one number that a plan cannot know.
"""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist

SHARE = 0.3
"""Mean length over the longest allowed, unless it is given."""
SPREAD = 0.7
"""Standard deviation of the logarithm of a length; an assumption, for few publish more than means."""


@cache
def answer_lengths(count: int, mean: float, longest: int, spread: float = SPREAD) -> tuple[int, ...]:
    """Lengths of so many answers, at least 1 and at most `longest`, whose mean is `mean`; without chance.

    They are the quantiles of a log-normal distribution, those beyond the limit at it, in an order that mixes long and
    short: two neighbours, and every k-th one, are spread over the whole distribution.

    Raises:
        ValueError: The mean is not between 1 and the limit.
    """
    if not 1 <= mean <= longest:  # NaN, too
        raise ValueError(f"answers of {mean:g} tokens on average are not between 1 and the longest, {longest}")
    normal = NormalDist()
    quantiles = [normal.inv_cdf((number + 0.5) / count) for number in range(count)]

    def at(scale: float) -> list[float]:
        return [min(float(longest), max(1.0, math.exp(scale + spread * z))) for z in quantiles]

    low, high = -20.0, math.log(longest) + 10 * spread
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(at(middle)) / count < mean else (low, middle)
    drawn = [min(longest, max(1, round(length))) for length in at(high)]
    return tuple(drawn[number] for number in _mixed(count))


def _mixed(count: int) -> list[int]:
    """The numbers below `count`, each once, in steps of about the golden ratio of it."""
    step = max(1, round(count * (math.sqrt(5) - 1) / 2))
    while math.gcd(step, count) > 1:
        step += 1
    return [number * step % count for number in range(count)]
