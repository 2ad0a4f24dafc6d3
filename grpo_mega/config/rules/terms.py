"""Options of a built-in reward term (names, types and bounds), and the lowest value that it can have."""

from __future__ import annotations

import math
from dataclasses import MISSING as REQUIRED
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, get_args, get_origin, get_type_hints

from grpo_mega.config.schema import RewardTerm
from grpo_mega.config.schema.terms import OPTIONS


def read_options(kind: str, given: dict[str, Any]) -> Any:
    """Options of a term of this kind, as the dataclass in `OPTIONS`.

    Raises:
        ValueError: An option is unknown, missing, of another type or out of bounds; the message begins with its name.
    """
    owner = OPTIONS[kind]
    known = {field.name: field for field in fields(owner)}
    hints = get_type_hints(owner)
    for name, value in given.items():
        if name not in known:
            close = get_close_matches(name, known, n=1)
            meant = f"did you mean {close[0]}?" if close else f"{kind} has {', '.join(known) or 'none'}"
            raise ValueError(f"{name} is no option of {kind}; {meant}")
        if not _is_a(value, hints[name]):
            raise ValueError(f"{name}={value!r}: write {_in_words(hints[name])}")
    for name, field in known.items():
        if name not in given and field.default is REQUIRED and field.default_factory is REQUIRED:
            raise ValueError(f"{name} must be given: {kind} needs {_in_words(hints[name])}")
    return owner(**{name: float(value) if hints[name] is float else value for name, value in given.items()})


def lowest(term: RewardTerm) -> float:
    """Lower bound of weight * value of a term whose options are valid.

    What a function, a program or a service returns is not known: the value is taken to be 0 or more.
    """
    low, high = 0.0, 1.0
    if term.built_in in ("overlong", "repetition"):
        low, high = -1.0, 0.0
    elif term.built_in == "judge":
        options = read_options(term.built_in, term.options)
        low, high = options.low, options.high
    elif term.built_in in ("", "command", "http"):
        high = math.inf
    return min(term.weight * low, term.weight * high) if term.weight else 0.0


def _is_a(value: Any, kind: Any) -> bool:
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_is_a(item, *get_args(kind)) for item in value)
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is kind


def _in_words(kind: Any) -> str:
    if get_origin(kind) is list:
        return "a list of texts"
    return {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}[kind]
