"""Tokenizers of Moonlight and Kimi-K2: a table of tiktoken, read as their program reads it, without running that."""

from __future__ import annotations

import base64
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import example, given
from hypothesis import strategies as st

from grpo_mega.data.huggingface import HuggingFaceTokenizer
from grpo_mega.data.tiktoken_table import PATTERN, RESERVED, TABLE
from grpo_mega.weights.companions import TOKENIZER_FILES

PARTS = regex.compile(PATTERN, regex.V1)
CORPUS = (
    "The answer is 42, isn't it? Let's see: 1234567 + 89 = 1234656.\n\n\tdef f(x):\n    return x ** 2  # squared\n"
    "答案是四十二。所以我们知道 x 等于三。 ÄÖÜ äöü ñandú naïve İstanbul ЁЖИК привет мир 日本語テキスト \U0001f600 \r\n"
)
NAMED = {0: "[BOS]", 1: "[EOS]", 4: "<|im_end|>", 7: "<|im_user|>", 255: "[PAD]"}
"""Of the reserved tokens, by their place."""


def trained(count: int) -> dict[bytes, int]:
    """A table as byte pair encoding learns it: 256 bytes, then the most frequent pair at a time."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    words = [[bytes([byte]) for byte in part.encode()] for part in PARTS.findall(CORPUS * 3)]
    while len(ranks) < count:
        pairs = Counter(pair for word in words for pair in pairwise(word))
        (left, right), _ = pairs.most_common(1)[0]
        ranks.setdefault(left + right, len(ranks))
        for word in words:
            at = 0
            while at + 1 < len(word):
                if (word[at], word[at + 1]) == (left, right):
                    word[at : at + 2] = [left + right]
                at += 1
    return ranks


RANKS = trained(420)


def reference(text: str) -> list[int]:
    """What tiktoken does: in every part, the neighbours that make the token of the lowest rank are merged first."""
    ids = []
    for part in PARTS.findall(text):
        pieces = [bytes([byte]) for byte in part.encode()]
        while True:
            ways = [(RANKS[a + b], at) for at, (a, b) in enumerate(pairwise(pieces)) if a + b in RANKS]
            if part.encode() in RANKS or not ways:
                break
            at = min(ways)[1]
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
        ids += [RANKS[part.encode()]] if part.encode() in RANKS else [RANKS[piece] for piece in pieces]
    return ids


def write(folder: Path, program: str = "tokenization_kimi", **settings: Any) -> Path:
    """A folder as these models are released, with a program that must not run."""
    folder.mkdir(exist_ok=True)
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in RANKS.items())
    (folder / TABLE).write_text("".join(lines))
    (folder / f"{program}.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    added = {len(RANKS) + place: {"content": name, "special": True} for place, name in NAMED.items()}
    usual = {
        "added_tokens_decoder": added, "bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer", "auto_map": {"AutoTokenizer": [f"{program}.TikTokenTokenizer", None]},
        "chat_template": "{% for m in messages %}<|im_user|>{{ m.content }}<|im_end|>{% endfor %}",
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(usual | settings))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(write(tmp_path_factory.mktemp("kimi")), "chat")


@given(st.text() | st.text(alphabet=CORPUS))
@example(CORPUS)
@example("IT'S\u4e2d\u6587ABC'll  \r\n \u00a0x")
def test_any_text_has_the_tokens_of_tiktoken_and_comes_back(tokenizer: HuggingFaceTokenizer, text: str) -> None:
    assert tokenizer.encode(text) == reference(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("program", ["tokenization_kimi", "tokenization_moonshot"])
def test_reserved_tokens_have_their_ids_and_the_program_does_not_run(tmp_path: Path, program: str) -> None:
    read = HuggingFaceTokenizer(write(tmp_path / "model", program), "chat")
    assert read.vocab_size == len(RANKS) + RESERVED
    ids = read.token_ids()
    assert all(ids[name] == len(RANKS) + place for place, name in NAMED.items())
    assert ids[f"<|reserved_token_{len(RANKS) + 2}|>"] == len(RANKS) + 2
    text, prompt = read.prompt("1+1? <|im_end|>")
    assert text == "<|im_user|>1+1? <|im_end|><|im_end|>"
    assert (prompt[0], prompt[-1]) == (ids["<|im_user|>"], ids["<|im_end|>"])
    assert prompt.count(ids["<|im_end|>"]) == 1, "what a problem quotes is text"
    assert read.eos_id == ids["[EOS]"]
    assert not (tmp_path / "model" / "ran").exists()
    assert {file.name for file in (tmp_path / "model").iterdir()} <= {*TOKENIZER_FILES}, "an export has all of it"


def test_the_table_and_the_reserved_tokens_are_the_vocabulary_of_the_released_models(tmp_path: Path) -> None:
    """Kimi-K2's and Moonlight's tables have 163,584 tokens, and their config.json says vocab_size=163840."""
    assert 163_584 + RESERVED == 163_840
    named = {"9": {"content": "<|beyond|>", "special": True}}
    with pytest.raises(ValueError, match="names token 9, but the reserved ones are 420 to 675"):
        HuggingFaceTokenizer(write(tmp_path / "model", added_tokens_decoder=named), "chat")


@pytest.mark.parametrize(("line", "why"), [("!! 3\n", ":421: not a token"), ("aGFs 7\n", "ranks are not 0 to 4")])
def test_a_damaged_table_is_named(tmp_path: Path, line: str, why: str) -> None:
    folder = write(tmp_path / "model")
    with (folder / TABLE).open("a") as file:
        file.write(line)
    with pytest.raises(ValueError, match=why):
        HuggingFaceTokenizer(folder, "chat")
