"""A curve of many points as few: nothing extreme is lost, and the ends stay."""

from __future__ import annotations

import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grpo_mega.show.report.thin import mean, thin

numbers = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(numbers, min_size=1, max_size=300), st.integers(3, 40))
def test_extremes_ends_and_order_stay(values: list[float], most: int) -> None:
    steps = [3 * index for index in range(len(values))]
    curve = thin(steps, values, most)
    assert len(curve.steps) == len(curve.mean) == min(most, len(values))
    assert (curve.steps[0], curve.steps[-1]) == (steps[0], steps[-1])
    assert (curve.mean[0], curve.mean[-1]) == (values[0], values[-1])
    assert curve.steps == sorted({*curve.steps})
    assert {*curve.steps} <= {*steps}
    if len(values) <= most:
        assert (curve.mean, curve.low, curve.high, curve.per_point) == (values, [], [], 1)
        return
    assert (min(curve.low), max(curve.high)) == (min(values), max(values))
    assert all(low <= middle <= high for low, middle, high in zip(curve.low, curve.mean, curve.high, strict=True))
    assert curve.per_point * len(curve.steps) >= len(values)


@given(st.lists(numbers, min_size=1))
@example([sys.float_info.max] * 3)
def test_a_mean_lies_between_the_values(values: list[float]) -> None:
    assert min(values) <= mean(values) <= max(values)


@pytest.mark.parametrize(("steps", "values", "most"), [([1], [], 3), ([1, 2, 3], [1.0, 2.0, 3.0], 2)])
def test_what_is_no_curve_is_refused(steps: list[int], values: list[float], most: int) -> None:
    with pytest.raises(ValueError, match=f"{len(steps)} steps and {len(values)} values as {most} points"):
        thin(steps, values, most)
