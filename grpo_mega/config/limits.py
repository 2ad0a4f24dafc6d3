"""Allowed values of a single setting, declared next to it in the schema:

    group_size: Annotated[int, Interval("[1, inf)")] = 8
    aggregation: Annotated[str, OneOf("sequence_mean", "token_mean", "constant")] = "token_mean"

Rules that involve more than one setting are in `rules`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from operator import attrgetter
from typing import get_type_hints


@dataclass(frozen=True)
class Interval:
    """The numbers between two ends, in mathematical notation: a bracket includes its end, a parenthesis does not.

    Attributes:
        text: The interval, such as "[0, inf)".
        reason: Why other numbers are refused, where that is not obvious.
    """

    text: str
    reason: str = ""

    def __contains__(self, value: float) -> bool:
        """Whether a number lies in the interval; NaN never does."""
        low, high = (float(end) for end in self.text[1:-1].split(","))
        above = low <= value if self.text[0] == "[" else low < value
        below = value <= high if self.text[-1] == "]" else value < high
        return above and below

    def __str__(self) -> str:
        return f"in {self.text}"

    def refusal(self, value: float) -> str:
        """Advice on what to choose instead of a number outside the interval."""
        return f"choose a value in {self.text}" + (f" ({self.reason})" if self.reason else "")


@dataclass(frozen=True, init=False)
class OneOf:
    """Limit to one of several words."""

    choices: tuple[str, ...]

    def __init__(self, *choices: str) -> None:
        """Sets the allowed words."""
        object.__setattr__(self, "choices", choices)

    def __contains__(self, value: str) -> bool:
        return value in self.choices

    def __str__(self) -> str:
        return f"one of {', '.join(self.choices)}"

    def refusal(self, value: str) -> str:
        """Advice on what to choose instead of another word: the closest allowed one."""
        close = get_close_matches(value, self.choices, n=1)
        return f"choose {self}" + (f"; did you mean {close[0]}?" if close else "")


@cache
def limits_of(schema: type) -> dict[str, Interval | OneOf]:
    """{dotted name: limit} of all limited settings of a dataclass, nested ones included."""
    limits: dict[str, Interval | OneOf] = {}
    hints = get_type_hints(schema, include_extras=True)
    for field in fields(schema):
        hint = hints[field.name]
        if is_dataclass(hint):
            limits |= {f"{field.name}.{name}": limit for name, limit in limits_of(hint).items()}  # type: ignore[arg-type]
        for limit in getattr(hint, "__metadata__", ()):
            limits[field.name] = limit
    return limits


def limit_problems(config: object, room: str = "") -> Iterator[str]:
    """Yields a message for every setting of a dataclass whose value violates its limit; None violates none.

    With a `room`, such as "data.", only that room is checked, and the others need not be set.
    """
    for name, limit in limits_of(type(config)).items():  # type: ignore[arg-type]
        value = attrgetter(name)(config) if name.startswith(room) else None
        if value is not None and value not in limit:
            yield f"{name}={value}: {limit.refusal(value)}"
