"""Tokenizers of Hugging Face directories: made here, of the two kinds there are, with and without a first token."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_tokenizer import write_tokenizer

from grpo_mega.data.huggingface import HuggingFaceTokenizer
from grpo_mega.data.jsonl import load_jsonl


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), with_bos=False)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(folder, "{prompt}")


@given(st.text())
def test_what_is_encoded_is_decoded(tokenizer: HuggingFaceTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_special_tokens_are_one_token_and_stay_in_the_text(tokenizer: HuggingFaceTokenizer) -> None:
    text = "<think>3 , 5</think><answer>8</answer><|im_end|>"
    ids = tokenizer.encode(text)
    assert ids[-1] == tokenizer.token_id("<|im_end|>")
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("with_bos", [False, True])
def test_a_problem_stands_in_its_template_behind_the_first_token(tmp_path: Path, with_bos: bool) -> None:
    made = HuggingFaceTokenizer(write_tokenizer(tmp_path, with_bos), "User: {prompt}. Assistant:")
    text = made.prompt("{x} in {prompt}")
    assert text == "<bos>" * with_bos + "User: {x} in {prompt}. Assistant:"
    assert made.encode(text).count(made.token_id("<bos>")) == with_bos


def test_the_chat_template_asks_for_the_assistant(folder: Path) -> None:
    made = HuggingFaceTokenizer(folder, "chat")
    assert made.prompt("3+5?") == "<|im_start|>user\n3+5?<|im_end|>\n<|im_start|>assistant\n"


def test_problems_of_a_file_are_asked_that_way(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text('{"prompt": "3+5?", "answer": 8}\n')
    made = HuggingFaceTokenizer(folder, "Q: {prompt} A:")
    (prompt,) = load_jsonl(path, made)
    assert prompt.text == "Q: 3+5? A:"
    assert made.decode(prompt.token_ids) == prompt.text


def test_bad_directories_and_tokens_are_refused(tmp_path: Path, tokenizer: HuggingFaceTokenizer) -> None:
    with pytest.raises(FileNotFoundError, match=r"data\.tokenizer=.*nowhere: no such directory"):
        HuggingFaceTokenizer(tmp_path / "nowhere", "{prompt}")
    with pytest.raises(ValueError, match="holds no tokenizer that can be read"):
        HuggingFaceTokenizer(tmp_path, "{prompt}")
    with pytest.raises(ValueError, match="has no chat template; write one out"):
        HuggingFaceTokenizer(write_tokenizer(tmp_path / "plain", with_bos=False, chat=False), "chat")
    with pytest.raises(ValueError, match=r"'<eos>' is not a token; the tokenizer's special tokens are .*<\|im_end\|>"):
        tokenizer.token_id("<eos>")


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    damaged = write_tokenizer(tmp_path, with_bos=False) / "tokenizer.json"
    damaged.write_text(damaged.read_text()[:-100])
    with pytest.raises(ValueError, match="holds no tokenizer that can be read"):
        HuggingFaceTokenizer(tmp_path, "{prompt}")
