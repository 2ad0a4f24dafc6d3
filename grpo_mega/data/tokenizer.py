"""What a tokenizer offers, and the characters' own, for tasks that a toy model learns in a minute."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Protocol

from grpo_mega.data.chat import Turn

_SPECIAL = ("<pad>", "<bos>", "<eos>", "<think>", "</think>", "<answer>", "</answer>")
_CHARACTERS = "0123456789+-*=:; ?\n"


class Tokenizer(Protocol):
    """Text to token ids and back.

    Attributes:
        vocab_size: Number of tokens.
    """

    vocab_size: int

    @property
    def eos_id(self) -> int | None:
        """The token that ends a text; None when there is none."""
        ...

    def prompt(self, problem: str) -> tuple[str, list[int]]:
        """The text that the policy reads when it is given a problem, special tokens included, and its token ids.

        Raises ValueError when the problem cannot be given.
        """
        ...

    def quoted(self, problem: str) -> list[str]:
        """Special tokens that the problem spells and that count as text there."""
        ...

    def checked(self, text: str) -> str:
        """The text, if it can be part of a prompt or a completion. Raises ValueError when it cannot."""
        ...

    def answered(self, asked: str | Sequence[Turn], completion: str) -> list[list[int]]:
        """Token ids of what the policy reads, for a problem or for a chat that it continues, and of what it answers.

        Special tokens in the completion count as such, and none is added. Raises ValueError as `prompt` does.
        """
        ...

    def chat(self, turns: Sequence[Turn]) -> list[list[int]]:
        """Token ids of a chat in parts: up to a turn of the assistant's, that turn, up to its next one, ...

        Special tokens in the assistant's turns count as such. Nothing after its last turn is there. Raises ValueError
        when the chat cannot be given in such parts.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, none added. Raises ValueError when there are none for it."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens kept."""
        ...

    def token_id(self, token: str) -> int:
        """The id of one token, such as `<eos>`. Raises ValueError when there is no such token."""
        ...


class CharTokenizer:
    """One token per tag or character (digits and operators); `encode` and `decode` are exact inverses."""

    pad_id = 0
    bos_id = 1
    eos_id = 2

    def __init__(self) -> None:
        """Builds the vocabulary: tags first, then characters."""
        self.tokens = (*_SPECIAL, *_CHARACTERS)
        self.vocab_size = len(self.tokens)
        self._ids = {token: i for i, token in enumerate(self.tokens)}
        self._split = re.compile("|".join(map(re.escape, _SPECIAL)) + "|.", re.DOTALL)

    def prompt(self, problem: str) -> tuple[str, list[int]]:
        """The problem behind `<bos>`, unless it begins with it. Raises ValueError as `encode` does."""
        text = problem if problem.startswith("<bos>") else "<bos>" + problem
        return text, self.encode(text)

    def checked(self, text: str) -> str:
        """The text. Raises ValueError as `encode` does."""
        self.encode(text)
        return text

    def answered(self, asked: str | Sequence[Turn], completion: str) -> list[list[int]]:
        """Token ids of the problem behind `<bos>`, and of the completion. Raises ValueError as `encode` does."""
        if not isinstance(asked, str):
            self.chat(asked)
        return [self.prompt(str(asked))[1], self.encode(completion)]

    def chat(self, turns: Sequence[Turn]) -> list[list[int]]:
        """Raises ValueError: there are no characters for chats."""
        raise ValueError("data.tokenizer=chars has no chat template; write 'prompt' and 'completion' as text")

    def quoted(self, problem: str) -> list[str]:
        """None: there are no characters that a tag could be spelt with."""
        return []

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Raises ValueError at the first character that is neither in the vocabulary nor a tag."""
        ids = []
        for match in self._split.finditer(text):
            token, position = match.group(), match.start()
            if token not in self._ids:
                raise ValueError(f"character {token!r} at position {position} is not in the vocabulary: {self}")
            ids.append(self._ids[token])
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens kept. Raises ValueError on an id outside the vocabulary."""
        ids = list(ids)
        for position, i in enumerate(ids):
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"token id {i} at position {position} is outside the vocabulary of {self.vocab_size}")
        return "".join(self.tokens[i] for i in ids)

    def token_id(self, token: str) -> int:
        """The id of one token, such as `<eos>`. Raises ValueError when there is no such token."""
        if token not in self._ids:
            raise ValueError(f"{token!r} is not a token; the vocabulary is {self}")
        return self._ids[token]

    def __str__(self) -> str:
        """The vocabulary, for error messages."""
        return " ".join(_SPECIAL) + f" and the characters {_CHARACTERS!r}"
