"""What counts as a verdict, and what does not."""

from __future__ import annotations

import enum
import json
import math
from dataclasses import asdict
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.reward.verdict import MOST_CHARACTERS, NoVerdict, Verdict, read_verdict

FINITE = st.floats(allow_nan=False, allow_infinity=False)


STEPS = st.dictionaries(st.integers(1, 10**9), FINITE, max_size=5).map(lambda steps: tuple(sorted(steps.items())))


@given(FINITE, st.text(max_size=50), st.text(max_size=50), STEPS)
def test_every_form_of_a_verdict_is_read(value: float, reason: str, unscorable: str, steps: tuple):
    assert read_verdict(value) == Verdict(value)
    assert read_verdict((value, reason)) == read_verdict([value, reason]) == Verdict(value, reason)
    verdict = Verdict(value, reason, unscorable, steps)
    expected = Verdict(0.0, reason, unscorable) if unscorable else verdict
    assert read_verdict(verdict) == read_verdict(asdict(verdict)) == expected
    assert read_verdict(json.loads(json.dumps(asdict(verdict)))) == expected


@given(
    st.none() | st.text() | st.sampled_from([math.nan, math.inf, -math.inf, 10**400, 1j]) | st.lists(FINITE, min_size=3)
)
def test_all_else_is_none(returned: object):
    for form in (returned, (returned, "because"), {"value": returned}, {"score": 1.0}):
        with pytest.raises(NoVerdict, match=r"^returned .*a reward must be a finite number"):
            read_verdict(form)


@pytest.mark.parametrize(
    ("steps", "number"),
    [
        ([[0, 1.0]], 1),
        ([[-3, 1.0]], 1),
        ([[3, 1.0], [3, 1.0]], 2),
        ([[3, 1.0], [2, 1.0]], 2),
        ([[3, math.nan]], 1),
        ([[3, 1.0], [4, math.inf]], 2),
        ([[3, "right"]], 1),
        ([[3, None]], 1),
        ([[3.0, 1.0]], 1),
        ([["3", 1.0]], 1),
        ([[3]], 1),
        ([[3, 1.0, "why"]], 1),
        ([3, 1.0], 1),
        ("3", 1),
        ({3: 1.0}, 1),
        (3, 1),
        ([[10**5000, 1.0]], 1),
    ],
)
def test_steps_are_finite_rewards_at_places_that_rise(steps: object, number: int):
    with pytest.raises(NoVerdict, match=rf"its steps must be pairs \(end, reward\): .*; number {number} is"):
        read_verdict({"value": 1.0, "steps": steps})


def test_numbers_of_all_kinds():
    class Colour(enum.Enum):
        RED = 3

    assert [read_verdict(x).value for x in (True, 3, Fraction(1, 4), Colour.RED)] == [1.0, 3.0, 0.25, 3.0]


def test_what_is_missing_is_empty_and_what_is_long_is_cut():
    assert read_verdict({"value": 1, "reason": None}) == Verdict(1.0)
    assert read_verdict({"unscorable": "away"}) == Verdict(0.0, "", "away")
    assert len(read_verdict((1, "x" * 9999)).reason) == MOST_CHARACTERS


@pytest.mark.parametrize("returned", [(1.0, 2.0), {"value": 1, "reason": ["a"]}, {"value": 1, "unscorable": 3}])
def test_a_reason_is_text(returned: object):
    with pytest.raises(NoVerdict, match="its reason must be text"):
        read_verdict(returned)


def test_values_that_cannot_be_shown_are_named_by_their_type():
    with pytest.raises(NoVerdict, match="returned a int; "):
        read_verdict(10**5000)
