"""Tokenizers released as a tiktoken table beside a program: Moonlight's and Kimi-K2's.

The program is never run, and a tokenizer.json beside it is not read. What the program adds to the table is the same in
all of these models, and is written here: the pattern by which text is split before bytes are merged, and the 256
reserved tokens after those of the table.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from grpo_mega.errors import InputError

TABLE = "tiktoken.model"
PROGRAMS = ("tokenization_kimi.TikTokenTokenizer", "tokenization_moonshot.TikTokenTokenizer")
"""Programs, as tokenizer_config.json names them, for which this holds."""
RESERVED = 256
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""Pattern of the parts of a text that are encoded separately."""


def is_table(folder: Path, program: str | None) -> bool:
    """Whether the tokenizer of this folder, which a `program` would read, can be read here."""
    return (folder / TABLE).is_file() and program is not None and program.split(",")[0] in PROGRAMS


def _ranks(table: Path) -> dict[bytes, int]:
    """{token: rank} of a table, one token in base64 and its rank a line."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(table.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            what = f"not a token in base64 and its rank: {error}"
            raise InputError(f"{table}:{number}", what, "download the file again") from error
    if sorted(ranks.values()) != [*range(len(ranks))]:
        what = f"ranks are not 0 to {len(ranks) - 1}, each once"
        raise InputError(str(table), what, "download the file again")
    return ranks


def read_table(folder: Path) -> Any:
    """The tokenizer as a fast one of transformers.

    Raises:
        InputError: The table is damaged, its ranks are not those of consecutive tokens, or a named token is not one of
            the reserved.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    ranks = _ranks(folder / TABLE)
    letters = bytes_to_unicode()

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    # tiktoken merges the neighbours that form the token of the lowest rank, whatever they consist of: every way of
    # dividing a token in two is a merge, in the order of the resulting tokens.
    merges = [
        (spelled(token[:cut]), spelled(token[cut:]))
        for token in sorted(ranks, key=lambda token: ranks[token])
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    # Like tiktoken, `ignore_merges` takes a part of the text that is a token as a whole without merging its bytes.
    tokenizer = Tokenizer(
        models.BPE({spelled(token): rank for token, rank in ranks.items()}, merges, ignore_merges=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    named = {int(number): token["content"] for number, token in settings.get("added_tokens_decoder", {}).items()}
    reserved = range(len(ranks), len(ranks) + RESERVED)
    if outside := sorted(named.keys() - {*reserved}):
        raise InputError(
            f"{folder / 'tokenizer_config.json'}: added_tokens_decoder",
            f"names token {outside[0]}, but the reserved ones are {reserved[0]} to {reserved[-1]}, after those of "
            f"{TABLE}",
            "download both files of one release",
        )
    tokenizer.add_special_tokens(
        [AddedToken(named.get(i, f"<|reserved_token_{i}|>"), special=True, normalized=False) for i in reserved]
    )
    ends = {key: settings[key] for key in ("bos_token", "eos_token", "pad_token", "unk_token") if settings.get(key)}
    ends = {key: token["content"] if isinstance(token, dict) else token for key, token in ends.items()}
    template = folder / "chat_template.jinja"
    chat = template.read_text(encoding="utf-8") if template.is_file() else settings.get("chat_template")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=chat, clean_up_tokenization_spaces=False, **ends
    )
