"""Splits a chat at the ends of the assistant's turns, to tell which tokens the assistant wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from grpo_mega.errors import InputError

ASSISTANT = "assistant"
USER = "user"
ROLES = ("system", USER, ASSISTANT, "tool")
ANCHORS = ("\n", ">", "|", "0", "x")
"""Prefixes for encoding a text that follows another; at least one shares no token with the text's first letter."""


Message: TypeAlias = Mapping[str, Any]
"""A message of an agent's request: "role", "content", and perhaps "tool_calls", "tool_call_id" or "name"."""


@dataclass(frozen=True)
class Turn:
    """One message of a chat.

    Attributes:
        role: One of ROLES.
        content: Text of the message.
    """

    role: str
    content: str


def with_opening(asked: str | list[dict[str, str]], opening: str) -> str | list[dict[str, str]]:
    """A problem, text or chat messages as JSON, with the text an environment adds, in a chat to the last message."""
    if isinstance(asked, str):
        return asked + opening
    *before, last = asked
    return [*before, last | {"content": last["content"] + opening}]


def texts_at_cuts(turns: Sequence[Turn], render: Callable[[Sequence[Turn], bool], str], template: str) -> list[str]:
    """Prefixes of the rendered chat, cut at the start and the end of each assistant turn.

    Each prefix begins with the previous one: the chat is rendered turn by turn, and compared.

    Args:
        turns: The chat.
        render: The template: the text of some turns and, if the flag is set, of how the assistant's next turn begins.
        template: The template's name, for errors.

    Raises:
        InputError: The template renders earlier turns differently when others follow; names the turn.
    """
    texts = [""]
    for i, turn in enumerate(turns):
        if turn.role != ASSISTANT:
            continue
        # The first cut is after the header that opens the assistant's turn: the policy is given it and never writes it.
        for text in (render(turns[:i], True), render(turns[: i + 1], False)):
            if not text.startswith(texts[-1]):
                raise InputError(
                    template,
                    f"changes the text before messages[{i}] when more follows (models that think drop earlier "
                    "thoughts), so the assistant's tokens cannot be identified",
                    "write one line for each of its turns, with the messages before it as 'prompt' and its answer as "
                    "'completion'",
                )
            texts.append(text)
    return texts[1:]


def encoded_parts(texts: Sequence[str], encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Token ids of each prefix's addition to the previous prefix.

    No token crosses a cut: where the longer text would be tokenized differently there, the addition is encoded alone,
    as the policy generates it after a prompt whose tokens are given.

    Raises:
        InputError: The addition cannot be encoded separately, or the first text has no tokens.
    """
    ids: list[int] = []
    parts: list[list[int]] = []
    before = ""
    for text in texts:
        whole = encode(text)
        part = whole[len(ids) :] if whole[: len(ids)] == ids else encoded_separately(text[len(before) :], encode)
        ids, before = ids + part, text
        parts.append(part)
    with_tokens(texts[0], parts[0])
    return parts


def with_tokens(prompt: str, ids: list[int]) -> list[int]:
    """Returns a prompt's token ids. Raises InputError for a text without any, as nothing predicts a first one."""
    if prompt and not ids:
        raise InputError(f"{prompt[:20]!r}", "the tokenizer has no token for any of it", "choose another tokenizer")
    return ids


def encoded_separately(text: str, encode: Callable[[str], list[int]]) -> list[int]:
    """Token ids of a text that follows another; encoded alone, SentencePiece tokenizers would prepend a space."""
    for anchor in ANCHORS:
        alone, with_text = encode(anchor), encode(anchor + text)
        if with_text[: len(alone)] == alone:
            return with_text[len(alone) :]
    what = f"every encoding of {text[:20]!r} depends on the text before it"
    raise InputError("the tokenizer", what, "write the text differently, or choose another tokenizer")
