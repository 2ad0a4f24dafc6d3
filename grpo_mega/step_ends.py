"""Ends of the steps of a completion, in its text and in its tokens.

A process reward model uses this one rule for steps both in its training and when it scores in reinforcement learning.

Tokens and characters do not align: a token spells several characters or a part of one, and its decoding depends on its
neighbours.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from grpo_mega.errors import InputError
from grpo_mega.types import Decode

STRETCH = 64
"""Number of tokens decoded at once, so that the cost is linear in the length of a completion."""
BYTES = 4
"""Largest number of bytes of a character: among this many tokens after a stretch, one ends a character."""


def step_ends(text: str, separators: Sequence[str]) -> list[int]:
    """One past the last character of each step of a completion's text, ascending; at least one step.

    A separator divides steps and belongs to neither; of separators at the same position the longest counts. Text
    between two separators is a step unless it is blank. The last step always extends to the end of the text.
    """
    return [*(end for _, end in _steps(text, separators)[:-1]), len(text)]


def beginnings(text: str, separators: Sequence[str]) -> list[str]:
    """Prefixes of a text before each step but the first: up to the `step_ends` except the last, including the
    separators that follow."""
    return [text[:start] for start, _ in _steps(text, separators)[1:]]


def _steps(text: str, separators: Sequence[str]) -> list[tuple[int, int]]:
    """(first character, one past the last) of the non-blank parts between separators."""
    pattern = "|".join(re.escape(each) for each in sorted(separators, key=len, reverse=True))
    cuts = [(match.start(), match.end()) for match in re.finditer(pattern, text)]
    starts, ends = [0, *(end for _, end in cuts)], [*(start for start, _ in cuts), len(text)]
    return [(start, end) for start, end in zip(starts, ends, strict=True) if text[start:end].strip()]


def step_tokens(text: str, token_ids: Sequence[int], decode: Decode, separators: Sequence[str]) -> list[int]:
    """Index of the last token of each of the `step_ends`; equal for steps that end within one token.

    The last step ends with the last token, including a stop token.

    Args:
        text: Text of the tokens, without a stop token.
        token_ids: The tokens of the completion, one or more.
        decode: Decodes token ids to text.
        separators: See `step_ends`.

    Raises:
        InputError: See `last_tokens`.
    """
    return [*last_tokens(text, token_ids, decode, step_ends(text, separators)[:-1]), len(token_ids) - 1]


def last_tokens(text: str, token_ids: Sequence[int], decode: Decode, ends: Sequence[int]) -> list[int]:
    """Finds the tokens that complete given prefixes of a text.

    The number of decoded tokens is linear in the number of tokens and of ends.

    Args:
        text: Text of the tokens.
        token_ids: The tokens.
        decode: Decodes token ids to text, from left to right.
        ends: Lengths of prefixes of the text in characters, ascending, from 1 to the whole length.

    Returns:
        For each end, index of the first token that completes text[:end].

    Raises:
        InputError: Parts of the tokens decode differently from the whole.
    """
    tokens, here = [], _Boundary(0, 0, 0)
    for end in ends:
        while (further := _next_boundary(text, token_ids, decode, here)) and further.spelled < end:
            here = further
        step = text[here.spelled : end]
        candidates = range(here.token, further.token if further else len(token_ids))
        # More tokens spell a longer text, so "spells the step" is false up to some token and true from it on.
        at = bisect_left(candidates, True, key=partial(_is_spelled, step, here, token_ids, decode))
        if at == len(candidates):
            raise InputError(
                f"tokens {here.token} to {len(token_ids) - 1} of a completion",
                "the tokenizer spells them differently without the earlier ones, so no token can be told to end a step",
                "take a model with another tokenizer, or a reward of whole completions (algorithm.supervision=outcome)",
            )
        tokens.append(candidates[at])
    return tokens


@dataclass(frozen=True)
class _Boundary:
    """A position between two tokens up to which the tokens spell the text exactly.

    Attributes:
        context: First token to decode together with those after the boundary, as decoders treat the first token of a
            text specially, e.g. drop its space.
        token: The token after the boundary.
        spelled: Number of characters before the boundary.
    """

    context: int
    token: int
    spelled: int


def _next_boundary(text: str, token_ids: Sequence[int], decode: Decode, here: _Boundary) -> _Boundary | None:
    """A boundary about `STRETCH` tokens further on; None when there is none before the end of the text."""
    stretch = STRETCH
    while here.token + stretch < len(token_ids):
        for token in range(here.token + stretch, min(here.token + stretch + BYTES, len(token_ids))):
            more = _after(here, token, token_ids, decode)
            if more and text.startswith(more, here.spelled):
                return _Boundary(here.token, token, here.spelled + len(more))
        stretch *= 2  # skips stretches without boundary, such as bytes that are no characters
    return None


def _is_spelled(step: str, here: _Boundary, token_ids: Sequence[int], decode: Decode, token: int) -> bool:
    """Whether the tokens from a boundary up to and including `token` spell `step`, possibly followed by more."""
    return _after(here, token + 1, token_ids, decode).startswith(step)


def _after(here: _Boundary, end: int, token_ids: Sequence[int], decode: Decode) -> str:
    """Text of the tokens between a boundary and token `end`."""
    return decode(token_ids[here.context : end])[len(decode(token_ids[here.context : here.token])) :]
