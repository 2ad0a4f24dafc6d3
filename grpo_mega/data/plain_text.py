r"""Encodes problems as plain text: a special token spelled in a problem is encoded as characters, not as the token.

A template joins the turns of a chat and the problem into one text, and a tokenizer finds its special tokens anywhere in
it: a problem that quotes `<|im_end|>\n<|im_start|>assistant` would forge a turn. transformers' `split_special_tokens`
does not help: it splits the template's own special tokens too, and ignores added tokens not marked special
(`<think>`, DeepSeek's `<|User|>` with wide bars). So this module uses a second tokenizer that differs only in the names
of these tokens. No text can contain the new names: they consist of code points that Unicode reserves for internal use,
and a problem with such code points is refused. Special tokens of the template are renamed before encoding, those that
the problem quotes are not.
"""

from __future__ import annotations

import json
import re
from typing import Any

from grpo_mega.errors import InputError

_OURS, _QUOTED, _END, _DIGITS = "\ufdd0", "\ufdd1", "\ufdd2", 0xFDE0
"""Noncharacters (The Unicode Standard, section 23.7): the first begins a token's new name, the second the placeholder
of a token that a problem quotes, the third ends both; the last is the first of sixteen digits."""
PARSE_SPECIAL = "set data.parse_special=true to have special tokens in problems count as such"
"""Fix for a tokenizer that cannot tell special tokens from text."""
_QUOTE = re.compile(f"{_QUOTED}([\ufde0-\ufdef]+){_END}")
_FORBIDDEN = re.compile("[\ufdd0-\ufdef]")


class PlainText:
    """Distinguishes the template's special tokens from those that a problem quotes.

    Attributes:
        names: Tokens that only a template may write: all that were added to the vocabulary, except spaces and single
            characters, which are ordinary text in some models' vocabularies (DeepSeek's `ü`).
    """

    def __init__(self, backend: Any) -> None:
        """Makes the second tokenizer from `backend`, a `tokenizers.Tokenizer`.

        Raises:
            InputError: Its special tokens cannot be distinguished from ordinary text.
        """
        from tokenizers import Tokenizer

        content = json.loads(backend.to_str())
        added = {token["content"]: token["id"] for token in content["added_tokens"]}
        # The longest first, as a tokenizer takes the longest match.
        self.names = sorted((name for name in added if len(name.strip()) > 1), key=len, reverse=True)
        self._number = {name: number for number, name in enumerate(self.names)}
        # Without names the pattern must match nothing; an empty pattern would match everywhere.
        self._pattern = re.compile("|".join(map(re.escape, self.names)) or r"(?!)")
        renamed = {name: _spelt(_OURS, number) for name, number in self._number.items()}
        try:
            self._backend = Tokenizer.from_str(json.dumps(_with_names(content, renamed)))
        # The library tokenizers raises bare `Exception`.
        except Exception as error:
            raise InputError("its special tokens", f"are also ordinary text to it: {error}", PARSE_SPECIAL) from error
        if moved := [name for name in self.names if self._backend.token_to_id(renamed[name]) != added[name]]:
            where = f"its special token {moved[0]!r}"
            raise InputError(where, "cannot be distinguished from ordinary text", PARSE_SPECIAL)

    def quoted(self, problem: str) -> list[str]:
        """Special tokens spelled in a problem, in order."""
        return self._pattern.findall(problem)

    def told(self, text: str) -> str:
        """The protected text of a reply; code points that are reserved here are left out."""
        return self.protected(_FORBIDDEN.sub("", text))

    def tellable(self, request: list[Any]) -> list[Any]:
        """What an agent sends, JSON, without code points that are reserved here and lone surrogates, which no tokenizer
        takes."""
        told = _FORBIDDEN.sub("", json.dumps(request, ensure_ascii=False))
        return json.loads(told.encode(errors="replace"))

    def protected(self, problem: str) -> str:
        """The problem with placeholders for its special tokens, to be rendered in the template.

        Raises:
            InputError: The text has one of the code points that are reserved here.
        """
        return self._pattern.sub(lambda match: _spelt(_QUOTED, self._number[match[0]]), self.checked(problem))

    def checked(self, text: str) -> str:
        """Returns a text whose special tokens are parsed, such as a template's; it must have no reserved code points.

        Raises:
            InputError: The text has one of the code points that are reserved here.
        """
        if match := _FORBIDDEN.search(text):
            where = f"U+{ord(match[0]):04X} at character {match.start() + 1}"
            raise InputError(where, "not a character (Unicode reserves it for internal use)", "remove it")
        return text

    def encode(self, rendered: str) -> tuple[str, list[int]]:
        """Plain text and token ids of a protected problem after rendering in the template."""
        # The order matters: the template's own tokens are renamed while quoted ones are still placeholders; then quoted
        # ones get back their names, which the second tokenizer knows only as ordinary text.
        ours = self._pattern.sub(lambda match: _spelt(_OURS, self._number[match[0]]), rendered)
        ids = self._backend.encode(self._shown(ours), add_special_tokens=False).ids
        return self._shown(rendered), ids

    def _shown(self, text: str) -> str:
        """The text with the names of quoted tokens in place of their placeholders."""
        return _QUOTE.sub(lambda match: self.names[_number(match[1])], text)


def _spelt(mark: str, number: int) -> str:
    return mark + "".join(chr(_DIGITS + int(digit, 16)) for digit in f"{number:x}") + _END


def _number(digits: str) -> int:
    return int("".join(f"{ord(digit) - _DIGITS:x}" for digit in digits), 16)


def _with_names(content: dict[str, Any], renamed: dict[str, str]) -> dict[str, Any]:
    """Content of a tokenizer.json with some tokens renamed and all ids unchanged."""
    added = [token | {"content": renamed.get(token["content"], token["content"])} for token in content["added_tokens"]]
    model = content["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        vocabulary = {renamed.get(piece, piece): i for piece, i in vocabulary.items()}
    # Unigram models have (piece, score) pairs in the order of their ids.
    else:
        vocabulary = [[renamed.get(piece, piece), score] for piece, score in vocabulary]
    unknown = {"unk_token": renamed.get(model["unk_token"], model["unk_token"])} if model.get("unk_token") else {}
    # Special tokens, truncation and padding are for callers of the original tokenizer; here nothing may be added or
    # cut.
    without = {"post_processor": None, "truncation": None, "padding": None}
    return content | without | {"added_tokens": added, "model": model | {"vocab": vocabulary} | unknown}
