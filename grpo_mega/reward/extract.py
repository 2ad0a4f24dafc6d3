r"""Extracts the single final answer of a completion: `<answer>...</answer>`, `\boxed{...}`, or all of it.

A completion with several answers has none: otherwise a policy would be rewarded for listing guesses.
"""

from __future__ import annotations

import re

from grpo_mega.types import Sample

_TAG = re.compile(r"</?answer>")
_BOXED = r"\boxed"
# A backslash consumes the next character, so the literal braces `\{` and `\}` never open or close a group.
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def final_answer(sample: Sample, read: str) -> str | None:
    r"""Final answer of a completion, read from the place `read`; None when it has none.

    "tag" is the content of its only answer tag, "boxed" that of its only box, "text" the whole completion, which must
    have stopped by itself: one cut by the length limit has not reached its answer.
    """
    if read == "text":
        return sample.text if sample.finish_reason == "stop" else None
    return answer_tag(sample.text) if read == "tag" else boxed(sample.text)


def answer_tag(text: str) -> str | None:
    """Content of the only `<answer>...</answer>`; None when there is no pair, or any further answer tag."""
    tags = list(_TAG.finditer(text))
    if [tag.group() for tag in tags] != ["<answer>", "</answer>"]:
        return None
    return text[tags[0].end() : tags[1].start()]


def boxed(text: str) -> str | None:
    r"""Content of `\boxed{...}`, nested braces included.

    None when there is no box, when boxes disagree (one inside another always does), or when any is malformed.
    """
    content = None
    start = text.find(_BOXED)
    while start >= 0:
        start += len(_BOXED)
        inside = _group(text, start)
        if inside is None or content not in (None, inside):
            return None
        content = inside
        start = text.find(_BOXED, start)
    return content


def _group(text: str, start: int) -> str | None:
    """Content of the brace group that opens exactly at `start`; None if none opens there or it never closes."""
    if not text.startswith("{", start):
        return None
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[start + 1 : brace.start()]
    return None
