"""The planner compared with published measurements: one table of points, one set of constants for all of them."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location

import pytest
from ranks import REPOSITORY

spec = spec_from_file_location("planner_published", REPOSITORY / "docs" / "planner_published.py")
assert spec
assert spec.loader
published = sys.modules[spec.name] = module_from_spec(spec)  # dataclasses look their module up
spec.loader.exec_module(published)

PAGE = (REPOSITORY / "docs" / "planner.md").read_text().splitlines()
WITHIN = dict.fromkeys((2, 3, 6, 7, 8, 10, 11, 12, 20), 0.15) | dict.fromkeys((13, 16, 17, 18, 19), 0.25)
"""Row -> largest relative error of the plan: of throughput, and of the seconds of a step."""
MISSED = {4, 15, 21}
"""Rows that docs/planner.md lists with their error, and that are not promised."""


@pytest.mark.parametrize("point", published.POINTS, ids=lambda point: str(point.row))
def test_times_are_near_what_was_measured(point: published.Point) -> None:
    planned = published.predicted(point)
    assert published.line(point, planned) in PAGE
    if point.row in MISSED:
        faster = planned / point.published if point.unit == "tokens/s" else point.published / planned
        assert faster > 1  # the planner misses time that its model lacks
    else:
        assert planned == pytest.approx(point.published, rel=WITHIN[point.row])


def test_no_point_is_left_out() -> None:
    assert {point.row for point in published.POINTS} == WITHIN.keys() | MISSED


@pytest.mark.parametrize("point", published.MEMORY_POINTS, ids=lambda point: f"{point.row}-{point.practice.optimizer}")
def test_memory_is_near_what_was_measured_and_fits_where_it_did(point: published.MemoryPoint) -> None:
    size, limit = published.planned_bytes(point)
    assert published.memory_line(point, size, limit) in PAGE
    if isinstance(point.published, bool):
        assert (size <= limit) == point.published
    else:
        assert size == pytest.approx(point.published, rel=0.1)
