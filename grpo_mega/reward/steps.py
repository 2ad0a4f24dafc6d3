"""Rewards of a completion's steps: a term says at which character a step ends, process supervision needs the token.

Tokens and characters do not fit each other: a token spells several characters or a part of one, and what a decoder
makes of a token depends on its neighbours.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from grpo_mega.reward.verdict import Verdict
from grpo_mega.types import Sample

Decode = Callable[[Sequence[int]], str]
"""Token ids -> the text that they spell, as `Sample.text` is made."""
STRETCH = 64
"""Tokens that are decoded at once, so that the cost is linear in the length of a completion."""
BYTES = 4
"""Of a character, at most: so many tokens after a stretch, one of them ends a character."""


def steps_of_tokens(
    sample: Sample, verdicts: Sequence[tuple[float, Verdict]], decode: Decode
) -> tuple[tuple[int, float], ...]:
    """The steps of all terms together, as `Score.steps` has them.

    A term without steps counts as one step that ends with the completion and is rewarded with the term's value. Rewards
    of steps that end at the same token are added up.

    Args:
        sample: The sample.
        verdicts: (weight, verdict) of each of its terms; a weight of 0 counts for nothing.
        decode: How its tokens become text.

    Returns:
        (index of its last token, its reward) of each step; () when no term has steps.
    """
    weighted = [(weight, verdict) for weight, verdict in verdicts if weight]
    ends = sorted({end for _, verdict in weighted for end, _ in verdict.steps})
    if not ends:
        return ()
    # The text is without the stop token.
    spelled = sample.token_ids[:-1] if sample.finish_reason == "stop" else sample.token_ids
    token_of = dict(zip(ends, last_tokens(sample.text, spelled, decode, ends), strict=True))
    rewards: dict[int, float] = {}
    for weight, verdict in weighted:
        steps = [(token_of[end], reward) for end, reward in verdict.steps]
        for token, reward in steps or [(len(sample.token_ids) - 1, verdict.value)]:
            rewards[token] = rewards.get(token, 0.0) + weight * reward
    return tuple(sorted(rewards.items()))


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
                "earlier ones are missing, so that no token can be told to end a step; set algorithm.supervision="
                "outcome"
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
