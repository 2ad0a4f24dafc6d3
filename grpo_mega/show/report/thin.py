"""Thins curves so that one of any length is drawn at once: each point stands for a bucket of neighbours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

MOST = 600
"""Largest number of points of a curve; a screen has hardly more columns for it."""


@dataclass(frozen=True)
class ThinCurve:
    """The points of a curve that are drawn.

    Attributes:
        steps: [points] the step in the middle of each bucket.
        mean: [points] mean of the values in it.
        low, high: [points] the smallest and the largest one; empty where every point is a single value.
        per_point: Values in the largest bucket; 1 where nothing was thinned.
    """

    steps: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    per_point: int = 1


def thin(steps: Sequence[int], values: Sequence[float], most: int = MOST) -> ThinCurve:
    """Thins a curve to at most `most` points, at least 3; the first and the last point keep their own values.

    Raises:
        ValueError: `most` is below 3, or there is not one value for each step.
    """
    if most < 3 or len(steps) != len(values):
        raise ValueError(f"{len(steps)} steps and {len(values)} values as {most} points: give 3 or more, one a step")
    if len(steps) <= most:
        return ThinCurve(list(steps), list(values), [], [])
    # One bucket each for the first and last point, `most` - 2 of about equal size between them.
    inner, count = most - 2, len(steps)
    edges = [0, *(1 + index * (count - 2) // inner for index in range(inner)), count - 1, count]
    buckets = [values[start:end] for start, end in pairwise(edges)]
    middle = [steps[(start + end - 1) // 2] for start, end in pairwise(edges)]
    return ThinCurve(
        middle,
        [mean(bucket) for bucket in buckets],
        [min(bucket) for bucket in buckets],
        [max(bucket) for bucket in buckets],
        max(len(bucket) for bucket in buckets),
    )


def mean(values: Sequence[float]) -> float:
    """The mean, without overflow, and between the smallest and the largest value whatever the rounding."""
    # Half the mean is summed: of the largest floats, the sum of a whole one might be rounded up to infinity.
    half = math.fsum(value / (2 * len(values)) for value in values)
    return min(max(2 * half, min(values)), max(values))
