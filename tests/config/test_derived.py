"""Ranges of steps: FIRST:LAST has both ends, one step stands for itself, what has none is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.config.derived import read_steps

STEPS = st.integers(1, 10**9)


@given(STEPS, STEPS, st.sampled_from(["", " "]))
def test_a_range_has_both_of_its_ends_or_is_refused(first: int, last: int, space: str) -> None:
    text = f"{first}{space}:{last}"
    if last < first:
        with pytest.raises(ValueError, match=f"write {last}:{first}"):
            read_steps(text)
    else:
        assert read_steps(text) == range(first, last + 1)


def test_one_step_stands_for_itself() -> None:
    assert read_steps("7") == range(7, 8)


@given(st.text(max_size=6))
def test_anything_else_is_refused(text: str) -> None:
    try:
        steps = read_steps(text)
    except ValueError:
        return
    assert len(steps) > 0
    assert {*text} <= set("0123456789: \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0") | {c for c in text if c.isspace()}
