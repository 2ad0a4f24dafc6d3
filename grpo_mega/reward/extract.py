r"""Reads the one final answer out of a completion: `<answer>...</answer>` or `\boxed{...}`.

A completion that offers several answers has none: otherwise a policy is paid for listing guesses.
"""

from __future__ import annotations

import re

_TAG = re.compile(r"</?answer>")
_BOXED = r"\boxed"
# A backslash takes the next character with it, so the literal braces `\{` and `\}` never open or close a group.
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def answer_tag(text: str) -> str | None:
    """The content of the only `<answer>...</answer>`; None when there is no pair, or any further answer tag."""
    tags = list(_TAG.finditer(text))
    if [tag.group() for tag in tags] != ["<answer>", "</answer>"]:
        return None
    return text[tags[0].end() : tags[1].start()]


def boxed(text: str) -> str | None:
    r"""The content of `\boxed{...}`, nested braces included.

    None when there is no box, when boxes disagree (one inside another always does), or when any is malformed.
    """
    content = None
    start = text.find(_BOXED)
    while start >= 0:
        start += len(_BOXED)
        found = _group(text, start)
        if found is None or content not in (None, found):
            return None
        content = found
        start = text.find(_BOXED, start)
    return content


def _group(text: str, start: int) -> str | None:
    """The content of the brace group that opens exactly at `start`; None when none does or it never closes."""
    if not text.startswith("{", start):
        return None
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[start + 1 : brace.start()]
    return None
