"""Tokenizers that are released as a table of tiktoken beside a program: Moonlight's and Kimi-K2's.

The program is never run, and a tokenizer.json beside it is not read. All that the program says beside the table is the
same in all of these models, and stands here: the pattern by which text is split before bytes are merged, and the 256
reserved tokens after those of the table.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

TABLE = "tiktoken.model"
PROGRAMS = ("tokenization_kimi.TikTokenTokenizer", "tokenization_moonshot.TikTokenTokenizer")
"""Programs, as tokenizer_config.json names them, of which this is known."""
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
"""Parts of a text, each of which is encoded alone."""


def is_table(folder: Path, program: str | None) -> bool:
    """Whether the tokenizer of this folder, which a `program` would read, can be read here."""
    return (folder / TABLE).is_file() and program is not None and program.split(",")[0] in PROGRAMS


def read_table(folder: Path) -> Any:
    """The tokenizer as a fast one of transformers.

    Raises:
        ValueError: The table is damaged, its ranks are not those of consecutive tokens, or a named token is not one of
            the reserved.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    ranks: dict[bytes, int] = {}
    for number, line in enumerate((folder / TABLE).read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise ValueError(f"{folder / TABLE}:{number}: not a token in base64 and its rank: {error}") from error
    if sorted(ranks.values()) != [*range(len(ranks))]:
        raise ValueError(f"{folder / TABLE}: ranks are not 0 to {len(ranks) - 1}, each once")
    letters = bytes_to_unicode()

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    # tiktoken merges the neighbours that make the token of the lowest rank, however that token was made before: every
    # way of dividing a token into two is a merge, in the order of what it makes.
    merges = [
        (spelled(token[:cut]), spelled(token[cut:]))
        for token in sorted(ranks, key=lambda token: ranks[token])
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    made = Tokenizer(models.BPE({spelled(token): rank for token, rank in ranks.items()}, merges, ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    named = {int(number): token["content"] for number, token in settings.get("added_tokens_decoder", {}).items()}
    reserved = range(len(ranks), len(ranks) + RESERVED)
    if outside := sorted(named.keys() - {*reserved}):
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: added_tokens_decoder names token {outside[0]}, but the reserved ones "
            f"are {reserved[0]} to {reserved[-1]}, after those of {TABLE}"
        )
    made.add_special_tokens(
        [AddedToken(named.get(i, f"<|reserved_token_{i}|>"), special=True, normalized=False) for i in reserved]
    )
    ends = {key: settings[key] for key in ("bos_token", "eos_token", "pad_token", "unk_token") if settings.get(key)}
    ends = {key: token["content"] if isinstance(token, dict) else token for key, token in ends.items()}
    template = folder / "chat_template.jinja"
    chat = template.read_text(encoding="utf-8") if template.is_file() else settings.get("chat_template")
    return PreTrainedTokenizerFast(
        tokenizer_object=made, chat_template=chat, clean_up_tokenization_spaces=False, **ends
    )
