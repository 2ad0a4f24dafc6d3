"""Chats that are cut where the assistant begins and ends, so that it is known which tokens it wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

ASSISTANT = "assistant"
ROLES = ("system", "user", ASSISTANT, "tool")
ANCHORS = ("\n", ">", "|", "0", "x")
"""What a text may be encoded after; one of them has no token together with its first letter."""


@dataclass(frozen=True)
class Turn:
    """One message of a chat.

    Attributes:
        role: One of ROLES.
        content: What it says.
    """

    role: str
    content: str


def texts_at_cuts(turns: Sequence[Turn], render: Callable[[Sequence[Turn], bool], str], template: str) -> list[str]:
    """The chat up to the beginning of the assistant's first turn, up to its end, up to the beginning of the next, ...

    Each text begins with the one before: turns are rendered one more at a time, and compared.

    Args:
        turns: The chat.
        render: The template: the text of some turns, and, if asked, of how the assistant's next one begins.
        template: Names it, for errors.

    Raises:
        ValueError: The template writes earlier turns in another way when others follow; names the turn.
    """
    texts = [""]
    for i, turn in enumerate(turns):
        if turn.role != ASSISTANT:
            continue
        for text in (render(turns[:i], True), render(turns[: i + 1], False)):
            if not text.startswith(texts[-1]):
                raise ValueError(
                    f"{template} does not keep the text before messages[{i}] as it is when more follows (models that "
                    "think drop earlier thoughts), so which tokens the assistant wrote cannot be told; write one line "
                    "for each of its turns, with the messages before it as 'prompt' and its answer as 'completion'"
                )
            texts.append(text)
    return texts[1:]


def encoded_parts(texts: Sequence[str], encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Token ids of what each text has more than the one before it, with which it begins.

    No token crosses a cut: where the longer text has other tokens around it, the rest is encoded apart, as the policy
    writes it after a prompt whose tokens are given.

    Raises:
        ValueError: The rest cannot be encoded apart.
    """
    ids: list[int] = []
    parts: list[list[int]] = []
    before = ""
    for text in texts:
        whole = encode(text)
        part = whole[len(ids) :] if whole[: len(ids)] == ids else _encoded_apart(text[len(before) :], encode)
        ids, before = ids + part, text
        parts.append(part)
    return parts


def _encoded_apart(text: str, encode: Callable[[str], list[int]]) -> list[int]:
    """Tokens of a text that something precedes: on its own, SentencePiece's tokenizers would put a space in front."""
    for anchor in ANCHORS:
        alone, with_text = encode(anchor), encode(anchor + text)
        if with_text[: len(alone)] == alone:
            return with_text[len(alone) :]
    raise ValueError(f"the tokenizer has no tokens for {text[:20]!r} that do not depend on what is before it")
