"""Annotations of the schema's settings: allowed values, and the other settings without which one has no effect.

    group_size: Annotated[int, Interval("[1, inf)")] = 8
    aggregation: Annotated[str, OneOf("sequence_mean", "token_mean", "constant")] = "token_mean"
    tau_pos: Annotated[float, Interval("(0, inf)"), With("algorithm.objective", OneOf("sapo"))] = 1.0

All other rules that involve more than one setting are in `rules`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from operator import attrgetter
from typing import Any, get_type_hints

from grpo_mega.errors import InputError


@dataclass(frozen=True)
class Interval:
    """The numbers between two ends, in mathematical notation: a bracket includes its end, a parenthesis does not.

    Attributes:
        text: The interval, such as "[0, inf)".
        reason: Why other numbers are refused, where that is not obvious.
    """

    text: str
    reason: str = ""
    fault = "out of range"

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
    fault = "unknown"

    def __init__(self, *choices: str) -> None:
        """Sets the allowed words."""
        # The only way to set a field of a frozen dataclass whose own __init__ takes the choices one by one.
        object.__setattr__(self, "choices", choices)

    def __contains__(self, value: str) -> bool:
        return value in self.choices

    def __str__(self) -> str:
        return f"one of {', '.join(self.choices)}"

    def refusal(self, value: str) -> str:
        """Advice on what to choose instead of another word: the closest allowed one."""
        close = get_close_matches(value, self.choices, n=1)
        return f"choose {self}" + (f"; did you mean {close[0]}?" if close else "")


@dataclass(frozen=True)
class IsSet:
    """Any value but null, 0 and an empty text or list."""

    def __contains__(self, value: object) -> bool:
        return bool(value)


@dataclass(frozen=True)
class With:
    """The setting, or every setting of the section, has an effect only while another setting has one of these values.

    Attributes:
        other: Dotted name of the other setting; without a dot, one of the same section.
        values: Its values with which this one has an effect.
    """

    other: str
    values: Interval | OneOf | IsSet

    def __str__(self) -> str:
        if isinstance(self.values, OneOf):
            return f"with {self.other}={' or '.join(self.values.choices)}"
        return f"with {self.other}" + ("" if isinstance(self.values, IsSet) else f" {self.values}")

    def remedy(self) -> str:
        """What to do with the other setting; its assignment can be copied, and intervals are words."""
        match self.values:
            case OneOf(choices=(first, *others)):
                return f"set {self.other}={first}" + (f" (or {', '.join(others)})" if others else "")
            case Interval(text=text):
                low = text[1:].partition(",")[0]
                return f"set {self.other} " + (f"to {low} or more" if text[0] == "[" else f"above {low}")
        return f"give {self.other}"


def written(value: object) -> str:
    """A value in the notation of the command line."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=asdict)


@cache
def _annotations(schema: type, prefix: str = "") -> dict[str, tuple[Any, ...]]:
    """{dotted name: annotations of a setting, preceded by those of the sections around it} of a dataclass."""
    said: dict[str, tuple[Any, ...]] = {}
    # With extras for the annotations, without for the type itself, which tells sections from settings.
    hints, plain = get_type_hints(schema, include_extras=True), get_type_hints(schema)
    for field in fields(schema):
        name = f"{prefix}{field.name}"
        here = tuple(
            With(f"{prefix}{one.other}", one.values) if isinstance(one, With) and "." not in one.other else one
            for one in getattr(hints[field.name], "__metadata__", ())
        )
        if is_dataclass(plain[field.name]):
            for below, also in _annotations(plain[field.name], f"{name}.").items():
                # A need of another setting is narrowed by a setting of the section that needs the same one.
                narrowed = {one.other for one in also if isinstance(one, With)}
                kept = (one for one in here if not (isinstance(one, With) and one.other in narrowed))
                said[below] = (*kept, *also)
        else:
            said[name] = here
    return said


def limits_of(schema: type) -> dict[str, Interval | OneOf]:
    """{dotted name: limit} of all limited settings of a dataclass, nested ones included."""
    return {
        name: one for name, said in _annotations(schema).items() for one in said if isinstance(one, (Interval, OneOf))
    }


def needs_of(schema: type) -> dict[str, list[With]]:
    """{dotted name: conditions under which it has an effect} of a dataclass's settings, nested ones included."""
    found = {name: [one for one in said if isinstance(one, With)] for name, said in _annotations(schema).items()}
    return {name: needs for name, needs in found.items() if needs}


def limit_problems(config: object, section: str = "") -> Iterator[InputError]:
    """Yields an error for every setting of a dataclass whose value violates its limit; None violates none.

    With a `section`, such as "data.", only that one is checked, and the others need not be set.
    """
    for name, limit in limits_of(type(config)).items():
        # Other sections may have required settings that are not set yet, and cannot be compared with an interval.
        value = attrgetter(name)(config) if name.startswith(section) else None
        if value is not None and value not in limit:
            yield InputError(f"{name}={value}", limit.fault, limit.refusal(value))


def idle_problems(config: object, section: str = "") -> Iterator[InputError]:
    """Yields an error for every setting that is set although it has no effect, by its `With`.

    With a `section`, as in `limit_problems`.
    """
    for name, needs in needs_of(type(config)).items():
        if not name.startswith(section):
            continue
        value, default = attrgetter(name)(config), default_of(type(config), name)
        # A default that a file or a command repeats cannot be told from one that was not given, and does no harm.
        for need in needs if value != default else ():
            other = attrgetter(need.other)(config)
            if other not in need.values:
                # An experiment's file may have set it, so that the command has nothing that could be left out.
                undone = " ".join(f"~{name}.{key}" for key in value) if default == {} else f"{name}={written(default)}"
                what = f"no effect with {need.other}={written(other)}"
                yield InputError(f"{name}={written(value)}", what, f"give {undone}, or {need.remedy()}")
                break


# Resolving annotations takes long, and each check of a configuration asks for those of every setting.
_types = cache(get_type_hints)


def default_of(schema: type, name: str) -> object:
    """Default of the setting of this dotted name below a dataclass."""
    first, _, rest = name.partition(".")
    if rest:
        return default_of(_types(schema)[first], rest)
    (field,) = (field for field in fields(schema) if field.name == first)
    return field.default if field.default_factory is MISSING else field.default_factory()
