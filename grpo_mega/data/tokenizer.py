"""Interface of tokenizers, and a character tokenizer for tasks that a small model learns in a minute."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from grpo_mega.config.schema import DataConfig, ModelConfig
from grpo_mega.data.chat import Message, Turn
from grpo_mega.errors import InputError
from grpo_mega.judges.numerals import NUMERALS

_SPECIAL = ("<pad>", "<bos>", "<eos>", "<think>", "</think>", "<answer>", "</answer>")
_CHARACTERS = "0123456789+-*=:; ?\n"
_PYTHON = ("def", "return", "f", "x", "y", "(", ")", ",")
"""Further tokens of tiny programs: each keyword is one token."""
_CALL = ("[", "]")
_WORDS = {"tiny_code": _PYTHON, "tiny_guess": _CALL, "tiny_mixture": _PYTHON, "tiny_product": _CALL}
"""Task -> further tokens."""


class Tokenizer(Protocol):
    """Converts text to token ids and back.

    Attributes:
        vocab_size: Number of tokens.
    """

    vocab_size: int

    @property
    def eos_id(self) -> int | None:
        """Token that ends a text; None when there is none."""
        ...

    def prompt(self, problem: str | Sequence[Turn]) -> tuple[str, list[int]]:
        """The policy's prompt for a problem, which may be a chat to continue, as text and as token ids.

        Special tokens are included. Raises InputError when the problem cannot be encoded.
        """
        ...

    def quoted(self, problem: str) -> list[str]:
        """Special tokens spelled in the problem, which are encoded as text."""
        ...

    def checked(self, text: str) -> str:
        """Returns the text if it can be part of a prompt or a completion, else raises InputError."""
        ...

    def answered(self, asked: str | Sequence[Turn], completion: str) -> list[list[int]]:
        """Token ids of the prompt, (a problem, or a chat that the policy continues), and of the completion.

        Special tokens in the completion are parsed, and none is added. Raises InputError as `prompt` does.
        """
        ...

    def chat(self, turns: Sequence[Turn]) -> list[list[int]]:
        """Token ids of a chat in alternating parts: text before an assistant turn, that turn, and so on.

        Special tokens in the assistant's turns are parsed. Text after the last assistant turn is left out. Raises
        InputError when the chat cannot be divided at its turns.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, none added. Raises InputError for characters without a token."""
        ...

    def reply(self, text: str, template: str) -> list[int]:
        """Token ids of an environment's reply in a template with {reply}.

        Special tokens are parsed in the template, never in the reply; characters without a token are left out of it.
        Raises InputError when the template cannot be encoded.
        """
        ...

    def reply_template(self, role: str, close: str, keep_thoughts: bool) -> str:
        """What the chat template writes after a call that ends with `close`, up to the policy's next turn, with {reply}
        for a message of this role.

        Raises InputError when that depends on the chat before, or when earlier thoughts are dropped and not to be kept.
        """
        ...

    def requested(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[int]]:
        """The prompt of an agent's request, as text and as token ids: its messages and tools in the chat template, up
        to the policy's turn.

        Special tokens are parsed in the assistant's messages and in the template only. Raises InputError when the
        template refuses the messages.
        """
        ...

    def continued(self, messages: Sequence[Message], end: str, keep_thoughts: bool) -> list[int] | None:
        """Token ids of what the chat template writes between a turn, which ended with `end`, and the policy's next
        turn, for these messages.

        None when the template refuses the messages, or writes something else after another chat, or when it drops the
        thoughts of the turn and they are not to be kept: then only `requested` writes what the policy must see.
        """
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, including special tokens."""
        ...

    def token_id(self, token: str) -> int:
        """The id of one token, such as `<eos>`. Raises InputError when there is no such token."""
        ...

    def token_ids(self) -> dict[str, int]:
        """Every token and its id."""
        ...


class CharTokenizer:
    """One token per tag, word or character (digits and operators); `encode` and `decode` are exact inverses."""

    # Position of `<eos>` in `_SPECIAL`.
    eos_id = 2

    def __init__(self, words: Sequence[str] = ()) -> None:
        """Builds the vocabulary: tags, then characters, then `words`, none of which can be spelled by other tokens."""
        self.tokens = (*_SPECIAL, *_CHARACTERS, *words)
        self.vocab_size = len(self.tokens)
        self._ids = {token: i for i, token in enumerate(self.tokens)}
        # Tags and words before single characters, which would otherwise match their first letters.
        self._split = re.compile("|".join(map(re.escape, (*_SPECIAL, *words))) + "|.", re.DOTALL)

    def prompt(self, problem: str | Sequence[Turn]) -> tuple[str, list[int]]:
        """The problem after one `<bos>`, as text and as token ids. Raises InputError as `encode` does."""
        if not isinstance(problem, str):
            raise InputError("data.tokenizer=chars", "has no chat template", "write the problem as text")
        text = problem if problem.startswith("<bos>") else "<bos>" + problem
        return text, self.encode(text)

    def checked(self, text: str) -> str:
        """Returns the text. Raises InputError as `encode` does."""
        self.encode(text)
        return text

    def answered(self, asked: str | Sequence[Turn], completion: str) -> list[list[int]]:
        """Token ids of `<bos>` and the problem, and of the completion. Raises InputError as `encode` does."""
        if not isinstance(asked, str):
            self.chat(asked)
        return [self.prompt(str(asked))[1], self.encode(completion)]

    def chat(self, turns: Sequence[Turn]) -> list[list[int]]:
        """Raises InputError: this tokenizer has no chat template."""
        fix = "write 'prompt' and 'completion' as text"
        raise InputError("data.tokenizer=chars", "has no chat template", fix)

    def quoted(self, problem: str) -> list[str]:
        """An empty list: no characters of the vocabulary can spell a tag."""
        return []

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Raises InputError at the first character that is neither in the vocabulary nor a tag."""
        ids = []
        for match in self._split.finditer(text):
            token, position = match.group(), match.start()
            if token not in self._ids:
                where = f"character {token!r} at position {position}"
                raise InputError(where, "not in the vocabulary", f"write only {self}")
            ids.append(self._ids[token])
        return ids

    def reply(self, text: str, template: str) -> list[int]:
        """Token ids of a reply in its template, a token for each character. Raises InputError as `encode` does."""
        before, _, after = template.partition("{reply}")
        return self.encode(before) + [self._ids[one] for one in text if one in self._ids] + self.encode(after)

    def reply_template(self, role: str, close: str, keep_thoughts: bool) -> str:
        """Raises InputError: this tokenizer has no chat template."""
        raise InputError(f"environment.reply={role}", "data.tokenizer=chars has no chat template", "write {reply}")

    def requested(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[int]]:
        """The contents one after the other after one `<bos>`, as there is no template; unknown characters are left
        out."""
        ids = [self._ids["<bos>"], *self.continued(messages, "", True)]
        return self.decode(ids), ids

    def continued(self, messages: Sequence[Message], end: str, keep_thoughts: bool) -> list[int]:
        """Token ids of the contents, one after the other, a token for each character; unknown ones are left out."""
        return [self._ids[one] for message in messages for one in message["content"] if one in self._ids]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens kept. Raises ValueError on an id outside the vocabulary."""
        ids = list(ids)
        for position, i in enumerate(ids):
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"token id {i} at position {position} is outside the vocabulary of {self.vocab_size}")
        return "".join(self.tokens[i] for i in ids)

    def token_id(self, token: str) -> int:
        """The id of one token, such as `<eos>`. Raises InputError when there is no such token."""
        if token not in self._ids:
            raise InputError(repr(token), "not a token", f"choose from {self}")
        return self._ids[token]

    def token_ids(self) -> dict[str, int]:
        """Every token and its id."""
        return dict(self._ids)

    def __str__(self) -> str:
        """The vocabulary, for error messages."""
        words = self.tokens[len(_SPECIAL) + len(_CHARACTERS) :]
        return " ".join((*_SPECIAL, *words)) + f" and the characters {_CHARACTERS!r}"


def character_tokenizer(data: DataConfig) -> CharTokenizer:
    """Tokenizer of `data.tokenizer=chars`, with the vocabulary of the task."""
    words = _WORDS.get(data.task, ())
    return CharTokenizer((*words, *(word for language in data.languages for word in NUMERALS[language])))


def fingerprint(tokenizer: Tokenizer) -> str:
    """Checksum of the vocabulary (all tokens and ids), equal for models that can exchange token ids."""
    return hashlib.sha256(repr(sorted(tokenizer.token_ids().items())).encode()).hexdigest()[:16]


def vocabulary(model: ModelConfig, tokenizer: Tokenizer) -> int:
    """Number of tokens that the model scores and samples.

    Raises:
        InputError: `model.vocab_size` is below the tokenizer's number.
    """
    if model.vocab_size is None:
        return tokenizer.vocab_size
    if model.vocab_size < tokenizer.vocab_size:
        raise InputError(
            f"model.vocab_size={model.vocab_size}",
            f"below the tokenizer's {tokenizer.vocab_size} tokens, so the model has no rows for the last ones",
            "if they were added to the tokenizer, such as a padding token, remove them from tokenizer.json, or give "
            "the model rows for them (transformers: model.resize_token_embeddings)",
        )
    return model.vocab_size
