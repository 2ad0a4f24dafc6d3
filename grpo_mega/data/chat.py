"""Chats that are cut where the assistant begins and ends, so that it is known which tokens it wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

ASSISTANT = "assistant"
ROLES = ("system", "user", ASSISTANT, "tool")


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

    No token crosses a cut: where the longer text has other tokens around it, the rest is encoded on its own, as the
    policy writes behind a prompt whose tokens are given.
    """
    ids: list[int] = []
    parts: list[list[int]] = []
    before = ""
    for text in texts:
        whole = encode(text)
        part = whole[len(ids) :] if whole[: len(ids)] == ids else encode(text[len(before) :])
        ids, before = ids + part, text
        parts.append(part)
    return parts
