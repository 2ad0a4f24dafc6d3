"""Ranges of steps in settings: 3:5 is steps 3, 4 and 5."""

from __future__ import annotations

import re


def read_steps(text: str) -> range:
    """Parses a range of steps FIRST:LAST, both included; FIRST alone is one step.

    Raises:
        ValueError: The text is not a range, or the range is empty; shows the format.
    """
    match = re.fullmatch(r"\s*(\d{1,12})\s*(?::\s*(\d{1,12})\s*)?", text, re.ASCII)
    if match is None:
        raise ValueError(f"{text!r} is no range of steps: write FIRST:LAST, such as 3:5, or one step")
    first, last = int(match[1]), int(match[2] or match[1])
    if first < 1:
        raise ValueError(f"{text!r} begins before the first step, which is 1")
    if last < first:
        raise ValueError(f"{text!r} has no step: its last one comes before its first; write {last}:{first}")
    return range(first, last + 1)
