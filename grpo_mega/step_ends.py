"""Where the steps of a completion end: in its text, and in its tokens.

The one rule of a process reward model: what it learns as a step, and what it scores as one in reinforcement learning,
is divided here.

Tokens and characters do not fit each other: a token spells several characters or a part of one, and what a decoder
makes of a token depends on its neighbours.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

Decode = Callable[[Sequence[int]], str]
"""Token ids -> the text that they spell, as `Sample.text` is made."""
STRETCH = 64
"""Tokens that are decoded at once, so that the cost is linear in the length of a completion."""
BYTES = 4
"""Of a character, at most: so many tokens after a stretch, one of them ends a character."""


def step_ends(text: str, separators: Sequence[str]) -> list[int]:
    """One past the last character of each step of a completion's text, rising; one step or more.

    A separator divides steps and belongs to neither; of separators at the same place the longest counts. What lies
    between two is a step unless it is blank. The last step reaches to the end of the text, whatever follows it.
    """
    return [*(end for _, end in _steps(text, separators)[:-1]), len(text)]


def beginnings(text: str, separators: Sequence[str]) -> list[str]:
    """What a text is up to where each of its steps but the first begins: after each of the `step_ends` but the last,
    the separators that follow it included."""
    return [text[:start] for start, _ in _steps(text, separators)[1:]]


def _steps(text: str, separators: Sequence[str]) -> list[tuple[int, int]]:
    """(first character, one past the last) of what lies between separators and is not blank."""
    pattern = "|".join(re.escape(each) for each in sorted(separators, key=len, reverse=True))
    cuts = [(match.start(), match.end()) for match in re.finditer(pattern, text)]
    starts, ends = [0, *(end for _, end in cuts)], [*(start for start, _ in cuts), len(text)]
    return [(start, end) for start, end in zip(starts, ends, strict=True) if text[start:end].strip()]


def step_tokens(text: str, token_ids: Sequence[int], decode: Decode, separators: Sequence[str]) -> list[int]:
    """The index of the last token of each of the `step_ends`; equal for steps that end within one token.

    The last step ends with the last token, that which ends the completion included.

    Args:
        text: What the tokens spell, without the one that ends the completion.
        token_ids: The tokens of the completion, one or more.
        decode: What makes text of them.
        separators: See `step_ends`.

    Raises:
        ValueError: See `last_tokens`.
    """
    return [*last_tokens(text, token_ids, decode, step_ends(text, separators)[:-1]), len(token_ids) - 1]


def last_tokens(text: str, token_ids: Sequence[int], decode: Decode, ends: Sequence[int]) -> list[int]:
    """The tokens with which the beginnings of a text are spelled.

    The number of tokens that are decoded is linear in that of all tokens, and in that of the ends.

    Args:
        text: What the tokens spell.
        token_ids: The tokens.
        decode: What makes text of them, from left to right.
        ends: Lengths of beginnings of the text in characters, rising, from 1 to that of the text.

    Returns:
        For each end, the index of the first token with which text[:end] is complete.

    Raises:
        ValueError: The decoder makes something else of a part of the tokens than of all of them.
    """
    found, here = [], _Boundary(0, 0, 0)
    for end in ends:
        while (further := _next_boundary(text, token_ids, decode, here)) and further.spelled < end:
            here = further
        step = text[here.spelled : end]
        candidates = range(here.token, further.token if further else len(token_ids))
        at = bisect_left(candidates, True, key=partial(_is_spelled, step, here, token_ids, decode))
        if at == len(candidates):
            raise ValueError(
                f"the tokenizer spells tokens {here.token} to {len(token_ids) - 1} of a completion otherwise when the "
                "earlier ones are missing, so that no token can be told to end a step: take a model with another "
                "tokenizer, or a reward of whole answers without steps (algorithm.supervision=outcome)"
            )
        found.append(candidates[at])
    return found


@dataclass(frozen=True)
class _Boundary:
    """A place between two tokens up to which they spell the text.

    Attributes:
        context: The token from which on tokens are decoded with those after the boundary: decoders treat the first one
            of a text in another way, such as dropping its space.
        token: The token after the boundary.
        spelled: Number of characters before it.
    """

    context: int
    token: int
    spelled: int


def _next_boundary(text: str, token_ids: Sequence[int], decode: Decode, here: _Boundary) -> _Boundary | None:
    """A boundary some `STRETCH` tokens further on; None when there is none before the end of the text."""
    stretch = STRETCH
    while here.token + stretch < len(token_ids):
        for token in range(here.token + stretch, min(here.token + stretch + BYTES, len(token_ids))):
            more = _after(here, token, token_ids, decode)
            if more and text.startswith(more, here.spelled):
                return _Boundary(here.token, token, here.spelled + len(more))
        stretch *= 2  # past whatever no boundary is in, such as bytes that are no characters
    return None


def _is_spelled(step: str, here: _Boundary, token_ids: Sequence[int], decode: Decode, token: int) -> bool:
    """Whether the tokens between a boundary and this one, which is included, spell a text, and perhaps more."""
    return _after(here, token + 1, token_ids, decode).startswith(step)


def _after(here: _Boundary, end: int, token_ids: Sequence[int], decode: Decode) -> str:
    """What the tokens between a boundary and token `end` spell."""
    return decode(token_ids[here.context : end])[len(decode(token_ids[here.context : here.token])) :]
