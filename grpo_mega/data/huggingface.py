"""A model's own tokenizer, from a Hugging Face directory, behind the interface that all tokenizers have here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from grpo_mega.data.chat import ASSISTANT, Turn, encoded_parts, texts_at_cuts
from grpo_mega.data.plain_text import PlainText

CHAT = "chat"
"""The template that stands for the tokenizer's own chat template."""
ORDINARY = "What is 3 + 5?"
"""A problem that quotes no special token."""


class HuggingFaceTokenizer:
    """A fast tokenizer with the special tokens it puts in front of a text, and a template for problems."""

    def __init__(self, folder: str | Path, template: str, parse_special: bool = False) -> None:
        """Reads `folder` and nothing from the network; `template` and `parse_special`: see `schema.DataConfig`.

        Raises:
            FileNotFoundError: There is no such directory.
            ValueError: It holds no tokenizer, one without a chat template that is asked for or with one that fails, or
                one whose special tokens cannot be told from text.
        """
        if not Path(folder).is_dir():
            raise FileNotFoundError(
                f"data.tokenizer={folder}: no such directory; give one with a tokenizer.json, or chars"
            )
        self._folder, self._tokenizer, self._template = folder, _loaded(Path(folder)), template
        if template == CHAT and not self._tokenizer.chat_template:
            raise ValueError(f"data.template=chat, but the tokenizer in {folder} has no chat template; write one out")
        self.vocab_size = len(self._tokenizer)
        self.eos_id: int | None = self._tokenizer.eos_token_id
        bos = self._tokenizer.bos_token_id
        added = bos is not None and self._tokenizer.encode("a")[:1] == [bos]
        self._opening = self._tokenizer.bos_token if added else ""
        self._plain: PlainText | None = None if parse_special else self._plain_text()

    def prompt(self, problem: str) -> tuple[str, list[int]]:
        """What the policy reads: the problem in the template, behind the token that texts begin with; and its tokens.

        Special tokens in the template count as such, in the problem only with `parse_special`.

        Raises:
            ValueError: The template refuses the problem, or it cannot be encoded.
        """
        if self._plain is None:
            text = self._rendered(problem)
            return text, self.encode(text)
        return self._plain.encode(self._rendered(self._plain.protected(problem)))

    def checked(self, text: str) -> str:
        """The text. Raises ValueError when it holds code points that set special tokens apart from text."""
        return text if self._plain is None else self._plain.checked(text)

    def answered(self, asked: str | Sequence[Turn], completion: str) -> list[list[int]]:
        """Token ids of what the policy reads, for a problem or for a chat that it continues, and of what it answers.

        Raises:
            ValueError: The template refuses the problem, or it cannot be encoded.
        """
        asks = self._rendered(self._protected(asked)) if isinstance(asked, str) else self._rendered_turns(asked, True)
        return encoded_parts([asks, asks + self.checked(completion)], self._ids)

    def chat(self, turns: Sequence[Turn]) -> list[list[int]]:
        """Token ids of a chat in parts: up to a turn of the assistant's, that turn, up to its next one, ...

        Raises:
            ValueError: `template` is not chat, or the chat template fails or writes earlier turns in another way when
                others follow.
        """
        return encoded_parts(texts_at_cuts(turns, self._rendered_turns, self._chat_template), self._ids)

    def quoted(self, problem: str) -> list[str]:
        """Special tokens that the problem spells and that count as text."""
        return self._plain.quoted(problem) if self._plain else []

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens in it count as such, and none is added."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens kept."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def token_id(self, token: str) -> int:
        """The id of one token. Raises ValueError when there is no such token."""
        found = self._tokenizer.get_vocab().get(token)
        if found is None:
            special = ", ".join(self._tokenizer.all_special_tokens)
            raise ValueError(f"{token!r} is not a token; the tokenizer's special tokens are {special}")
        return found

    def _rendered(self, problem: str) -> str:
        if self._template != CHAT:
            return self._opening + self._template.replace("{prompt}", problem)
        return self._applied([{"role": "user", "content": problem}], True)

    def _rendered_turns(self, turns: Sequence[Turn], ask: bool) -> str:
        """Turns in the chat template, what they quote protected; with `ask`, and the assistant is to begin."""
        if self._template != CHAT:
            raise ValueError(
                "messages need the chat template, in which the policy is then also asked: set data.template=chat, or "
                "write 'prompt' and 'completion' as text"
            )
        contents = [self.checked(t.content) if t.role == ASSISTANT else self._protected(t.content) for t in turns]
        return self._applied(
            [{"role": turn.role, "content": content} for turn, content in zip(turns, contents, strict=True)], ask
        )

    def _applied(self, messages: list[dict[str, str]], ask: bool) -> str:
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
        except Exception as error:  # a template is a program: it raises what it likes, and jinja what it forbids
            raise ValueError(f"{self._chat_template} fails: {type(error).__name__}: {error}") from error

    @property
    def _chat_template(self) -> str:
        return f"the chat template in {self._folder}"

    def _protected(self, text: str) -> str:
        """What the policy reads."""
        return text if self._plain is None else self._plain.protected(text)

    def _ids(self, rendered: str) -> list[int]:
        return self.encode(rendered) if self._plain is None else self._plain.encode(rendered)[1]

    def _plain_text(self) -> PlainText:
        """What keeps problems apart from special tokens; an ordinary problem must have the tokens that it has without.

        Raises:
            ValueError: The tokenizer cannot be treated so.
        """
        anyway = "; set data.parse_special=true to have special tokens in problems count as such"
        if not self._tokenizer.is_fast:
            raise ValueError(f"data.tokenizer={self._folder} is no fast tokenizer{anyway}")
        try:
            plain = PlainText(self._tokenizer.backend_tokenizer)
        except ValueError as error:
            raise ValueError(f"data.tokenizer={self._folder}: {error}{anyway}") from error
        text = self._rendered(ORDINARY)
        if plain.encode(text) != (text, self.encode(text)):
            raise ValueError(f"data.tokenizer={self._folder}: special tokens cannot be told from text in it{anyway}")
        return plain


def _loaded(folder: Path) -> Any:
    from transformers import AutoTokenizer  # takes seconds to import, and toys do not need it

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a bare Exception is what tokenizers raises
        why = "" if (folder / "tokenizer.json").exists() else "; it has no tokenizer.json, and runs no code of its own"
        raise ValueError(f"data.tokenizer={folder} holds no tokenizer that can be read: {error}{why}") from error
