"""The calculator: right values, and nothing but calculation."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grpo_mega.environment.calculator import LONGEST, calculate

numbers = st.integers(0, 10**9).map(str)
expressions = st.lists(st.tuples(st.sampled_from(["+", "-", "*", " - ", " *"]), numbers), max_size=6)


@given(numbers, expressions)
def test_values_are_python_s(first: str, rest: list[tuple[str, str]]) -> None:
    expression = first + "".join(sign + number for sign, number in rest)
    assert calculate(expression) == str(eval(expression))


@given(st.text(alphabet="0123456789+-* ()a.\n", max_size=LONGEST + 9))
@example("9" * LONGEST)
@example("9" * (LONGEST + 1))
def test_any_text_has_a_value_or_is_refused(text: str) -> None:
    try:
        value = calculate(text)
    except ValueError:
        return
    assert re.fullmatch("-?[0-9]+", value)
    assert len(value) <= LONGEST


@pytest.mark.parametrize("text", ["2**9", "", "-3", "1+", "3 7", "1\n", "٣*٣", "__import__('os')", "9" * (LONGEST + 1)])
def test_what_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="whole numbers"):
        calculate(text)
