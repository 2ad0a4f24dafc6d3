"""A model's own tokenizer, from a Hugging Face directory, behind the interface that all tokenizers have here."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

CHAT = "chat"
"""The template that stands for the tokenizer's own chat template."""


class HuggingFaceTokenizer:
    """A fast tokenizer with the special tokens it puts in front of a text, and a template for problems."""

    def __init__(self, folder: str | Path, template: str) -> None:
        """Reads `folder` and nothing from the network; `template`: see `data.template`.

        Raises:
            FileNotFoundError: There is no such directory.
            ValueError: It holds no tokenizer, or one without a chat template that is asked for.
        """
        if not Path(folder).is_dir():
            raise FileNotFoundError(
                f"data.tokenizer={folder}: no such directory; give one with a tokenizer.json, or chars"
            )
        self._tokenizer, self._template = _loaded(Path(folder)), template
        if template == CHAT and not self._tokenizer.chat_template:
            raise ValueError(f"data.template=chat, but the tokenizer in {folder} has no chat template; write one out")
        self.vocab_size = len(self._tokenizer)
        bos = self._tokenizer.bos_token_id
        added = bos is not None and self._tokenizer.encode("a")[:1] == [bos]
        self._opening = self._tokenizer.bos_token if added else ""

    def prompt(self, problem: str) -> str:
        """The text that the policy reads: the problem in the template, behind the token that texts begin with."""
        if self._template == CHAT:
            turns = [{"role": "user", "content": problem}]
            return self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return self._opening + self._template.replace("{prompt}", problem)

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


def _loaded(folder: Path) -> Any:
    from transformers import AutoTokenizer  # takes seconds to import, and toys do not need it

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = "" if (folder / "tokenizer.json").exists() else "; it has no tokenizer.json, and runs no code of its own"
        raise ValueError(f"data.tokenizer={folder} holds no tokenizer that can be read: {error}{why}") from error
