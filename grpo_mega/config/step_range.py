"""Ranges of steps in settings: 3:5 is steps 3, 4 and 5."""

from __future__ import annotations

import re

from grpo_mega.errors import InputError


def read_steps(text: str) -> range:
    """Parses a range of steps FIRST:LAST, both included; FIRST alone is one step.

    Raises:
        InputError: The text is not a range, or the range is empty.
    """
    match = re.fullmatch(r"\s*(\d{1,12})\s*(?::\s*(\d{1,12})\s*)?", text, re.ASCII)
    if match is None:
        raise InputError(repr(text), "not a range of steps", "write FIRST:LAST, such as 3:5, or one step")
    first, last = int(match[1]), int(match[2] or match[1])
    if first < 1:
        raise InputError(repr(text), "begins before the first step", "begin at 1 or later")
    if last < first:
        raise InputError(repr(text), "the last step comes before the first", f"write {last}:{first}")
    return range(first, last + 1)
