"""The character tokenizer: exact round trips, a fixed vocabulary, errors that point at the culprit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from grpo_mega.data.tokenizer import CharTokenizer

TOKENIZER = CharTokenizer()


def test_vocabulary_order_is_fixed():
    assert TOKENIZER.vocab_size == 26
    assert TOKENIZER.decode(range(26)) == "<pad><bos><eos><think></think><answer></answer>0123456789+-*=:; ?\n"
    assert [TOKENIZER.token_id(token) for token in ("<pad>", "<bos>", "<eos>")] == [0, 1, TOKENIZER.eos_id]


def test_tags_are_one_token_each():
    assert TOKENIZER.encode("<bos>3+5=?<think></think>") == [1, 10, 17, 12, 20, 24, 3, 4]
    assert TOKENIZER.encode("") == []


@settings(max_examples=100)
@given(st.lists(st.integers(0, 25)))
def test_ids_survive_the_round_trip(ids: list[int]):
    assert TOKENIZER.encode(TOKENIZER.decode(ids)) == ids


@settings(max_examples=100)
@given(st.lists(st.sampled_from(TOKENIZER.tokens)))
def test_text_survives_the_round_trip(tokens: list[str]):
    assert TOKENIZER.decode(TOKENIZER.encode("".join(tokens))) == "".join(tokens)


@pytest.mark.parametrize(
    ("text", "culprit"), [("3+x", "'x' at position 2"), ("<eos><eo", "'<' at position 5"), ("\uff13", "'\uff13'")]
)
def test_encode_names_the_character(text: str, culprit: str):
    with pytest.raises(ValueError, match=culprit):
        TOKENIZER.encode(text)


@pytest.mark.parametrize("bad", [-1, 26])
def test_decode_refuses_ids_outside(bad: int):
    with pytest.raises(ValueError, match=f"token id {bad} at position 1"):
        TOKENIZER.decode([0, bad])


def test_unknown_token_lists_the_vocabulary():
    with refused("'<end>' | not a token"):
        TOKENIZER.token_id("<end>")
