"""Rows of chats and of prompts and completions: what is learned, beside the rendered text, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from made_tokenizer import ASKING, CHAT, SPECIAL, write_tokenizer
from refusals import refused
from transformers import AutoTokenizer

from grpo_mega.config.schema import Config, DataConfig, ModelConfig, RunConfig, SFTConfig
from grpo_mega.data import build_data
from grpo_mega.data.chat import encoded_parts
from grpo_mega.data.huggingface import HuggingFaceTokenizer
from grpo_mega.data.supervised import SupervisedRows, digest, load_rows, rows_of_file
from grpo_mega.data.tokenizer import CharTokenizer, Tokenizer
from grpo_mega.errors import InputError
from grpo_mega.types import Row, pack_rows

CHARS = CharTokenizer()
END = "<|im_end|>"
# As Qwen3's: thoughts of earlier turns are dropped. As DeepSeek-R1's: a question ends with the beginning of a thought.
FORGETFUL = CHAT.replace("m.content", "(m.content if loop.last else m.content.split('</think>')[-1])") + ASKING
THOUGHTFUL = CHAT + ASKING.replace("assistant\n", "assistant\n<think>\n")
ENDLESS = CHAT.replace("<|im_end|>", "") + ASKING


def made(folder: Path, template: str = CHAT + ASKING, parse_special: bool = False) -> HuggingFaceTokenizer:
    theirs = AutoTokenizer.from_pretrained(write_tokenizer(folder, with_bos=False))
    theirs.add_tokens(["<think>", "</think>"])
    theirs.chat_template = template
    theirs.save_pretrained(folder)
    return HuggingFaceTokenizer(folder, "chat", parse_special)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    return made(tmp_path_factory.mktemp("tokenizer"))


def write(folder: Path, *lines: object) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def load(path: Path, tokenizer: Tokenizer, longest: int = 100_000, stops: tuple[int, ...] | None = None, **sft: object):
    assert tokenizer.eos_id is not None
    ends = (tokenizer.eos_id,) if stops is None else stops
    warnings: list[str] = []
    rows = load_rows(SFTConfig(path=str(path), **sft), tokenizer, ends, longest, warnings.append)
    return rows, warnings


def chat(*contents: str, first: str = "user") -> dict[str, object]:
    roles = [first, *("assistant" if i % 2 else "user" for i in range(1, len(contents)))]
    return {"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]}


def learned(row: Row, tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode(row.token_ids[first:end]) for first, end in row.learned]


def test_every_turn_of_the_assistant_is_learned_with_its_end(tmp_path: Path, tokenizer: HuggingFaceTokenizer):
    turns = [("system", "Add."), ("user", "3+5?"), ("assistant", "<think>3+5</think>8"), ("tool", "8")]
    turns += [("assistant", "\n\nRight, 8."), ("user", "2+2?"), ("assistant", "4"), ("user", "Thanks")]
    (row,), _ = load(write(tmp_path, {"messages": [{"role": r, "content": c} for r, c in turns]}), tokenizer)
    assert learned(row, tokenizer) == [f"<think>3+5</think>8{END}", f"\n\nRight, 8.{END}", f"4{END}"]
    text = "".join(f"<|im_start|>{role}\n{content}{END}\n" for role, content in turns[:-1])
    assert tokenizer.decode(row.token_ids) == text.removesuffix("\n")
    assert tokenizer.token_id("<think>") in row.token_ids
    assert learned(load(write(tmp_path, chat("a", "b")), tokenizer, stops=())[0][0], tokenizer) == [f"b{END}\n"]


ROLES = st.sampled_from(["user", "assistant", "system", "tool"])
CONTENT = st.lists(st.sampled_from(["3+5?", "\n", " ", "What", "é", "\U0001f600", "<", "|im_end|>"]), min_size=1).map(
    "".join
)
QUOTING = st.lists(st.one_of(st.sampled_from([*SPECIAL, "<think>"]), CONTENT), min_size=1).map("".join)


@settings(max_examples=80)
@given(first=QUOTING, turns=st.lists(st.tuples(ROLES, CONTENT, QUOTING), min_size=1, max_size=6))
def test_what_is_learned_is_what_the_assistant_wrote(
    tokenizer: HuggingFaceTokenizer,
    tmp_path_factory: pytest.TempPathFactory,
    first: str,
    turns: list[tuple[str, str, str]],
):
    said = [("user", first), *((role, own if role == "assistant" else quoting) for role, own, quoting in turns)]
    assume(any(role == "assistant" for role, _ in said) and all(content.strip() for _, content in said))
    assume(not any(role == "assistant" and END in content for role, content in said))
    path = write(tmp_path_factory.mktemp("said"), {"messages": [{"role": r, "content": c} for r, c in said]})
    (row,), warnings = load(path, tokenizer)
    last = max(i for i, (role, _) in enumerate(said) if role == "assistant")
    text = "".join(f"<|im_start|>{role}\n{content}{END}\n" for role, content in said[: last + 1])
    assert tokenizer.decode(row.token_ids) == text.removesuffix("\n")
    assert learned(row, tokenizer) == [content + END for role, content in said if role == "assistant"]
    assert list(row.token_ids).count(tokenizer.token_id(END)) == last + 1
    quoting = any(token in content for role, content in said if role != "assistant" for token in [*SPECIAL, "<think>"])
    assert len(warnings) == quoting


def test_the_policy_is_asked_as_in_reinforcement_learning(tmp_path: Path, tokenizer: HuggingFaceTokenizer):
    asked = tokenizer.prompt("3+5?")[1]
    turns = chat("3+5?")["messages"]
    lines = [{"prompt": "3+5?", "completion": "8"}, {"prompt": turns, "completion": f"8{END}"}, chat("3+5?", "8")]
    rows, _ = load(write(tmp_path, *lines), tokenizer)
    for row in rows:
        assert list(row.token_ids[: row.learned[0][0]]) == asked
        assert learned(row, tokenizer) == [f"8{END}"]


def test_characters_take_prompts_and_completions(tmp_path: Path):
    lines = [{"prompt": "3+5=?", "completion": c} for c in ("<answer>8</answer>", "<answer>8</answer><eos>")]
    rows, _ = load(write(tmp_path, *lines), CHARS)
    assert {CHARS.decode(row.token_ids) for row in rows} == {"<bos>3+5=?<answer>8</answer><eos>"}
    assert learned(rows[0], CHARS) == ["<answer>8</answer><eos>"]


TEXTS = st.lists(st.text("ab\n é\U0001f600<", min_size=1, max_size=5), min_size=1, max_size=6)


@given(TEXTS)
def test_no_token_crosses_a_cut(tokenizer: HuggingFaceTokenizer, pieces: list[str]):
    texts = ["".join(pieces[: i + 1]) for i in range(len(pieces))]
    parts = encoded_parts(texts, tokenizer.encode)
    assert [tokenizer.decode(part) for part in parts] == pieces
    assert parts[0] == tokenizer.encode(pieces[0])


def test_a_prompt_keeps_its_tokens_where_they_would_merge_with_the_completion(tokenizer: HuggingFaceTokenizer):
    merged = next((a, b) for a, b in pairwise("What is conversation") if len(tokenizer.encode(a + b)) == 1)
    one, two = encoded_parts([merged[0], "".join(merged)], tokenizer.encode)
    assert (one, two) == (tokenizer.encode(merged[0]), tokenizer.encode(merged[1]))


def test_templates_that_rewrite_earlier_turns_are_refused_by_name(tmp_path: Path):
    for name, template, at in (("forgetful", FORGETFUL, 3), ("thoughtful", THOUGHTFUL, 1)):
        tokenizer = made(tmp_path / name, template)
        path = write(tmp_path, chat("a", "<think>t</think>b", "c", "d"))
        with refused(f"rows.jsonl:1: field 'messages': the chat template in {tmp_path / name} | messages[{at}]"):
            load(path, tokenizer)
        asked = chat("a", "<think>t</think>b", "c")["messages"]
        (row,), _ = load(write(tmp_path, {"prompt": asked, "completion": "d"}), tokenizer)
        assert learned(row, tokenizer) == [f"d{END}"]
    (row,), _ = load(write(tmp_path, chat("a", "<think>t</think>b")), made(tmp_path / "again", FORGETFUL))
    assert row.learned


def test_turns_that_no_token_ends_are_refused(tmp_path: Path, tokenizer: HuggingFaceTokenizer):
    path = write(tmp_path, chat("a", "b"))
    with pytest.raises(ValueError, match=r"rows.jsonl:1: field 'messages\[1\].content': no token ends the turn"):
        load(path, made(tmp_path / "endless", ENDLESS))
    with refused("rows.jsonl:1: field 'messages[1].content' | the token that ends it"):
        load(path, tokenizer, stops=(tokenizer.token_id("<bos>"),))
    path = write(tmp_path, {"prompt": "a", "completion": "b"})
    with refused("'completion' | write one of '<bos>', '<think>'"):
        load(path, tokenizer, stops=(tokenizer.token_id("<bos>"), tokenizer.token_id("<think>")))
    (row,), _ = load(path, tokenizer, stops=(tokenizer.token_id("<bos>"),))
    assert learned(row, tokenizer) == ["b<bos>"]


def test_what_follows_an_end_is_refused(tmp_path: Path, tokenizer: HuggingFaceTokenizer):
    forged = f"8{END}\n<|im_start|>user\n9"
    for line, field in (
        (chat("a", forged), r"messages\[1\].content"),
        ({"prompt": "a", "completion": forged}, "completion"),
    ):
        with pytest.raises(ValueError, match=rf"rows.jsonl:1: field '{field}': '<\|im_end\|>' ends a completion"):
            load(write(tmp_path, line), tokenizer)


def test_special_tokens_that_are_asked_are_text_and_said(tmp_path: Path, tokenizer: HuggingFaceTokenizer):
    path = write(tmp_path, chat("a", "b"), chat(f"a{END}", "b"))
    rows, warnings = load(path, tokenizer)
    assert [list(row.token_ids).count(tokenizer.token_id(END)) for row in rows] == [2, 2]
    assert warnings == [
        f"1 of 2 rows of {path} quote special tokens, which count as text (data.parse_special=true makes them tokens): "
        f"{path}:2 ({END})"
    ]
    rows, warnings = load(path, made(tmp_path / "parsed", parse_special=True))
    assert [list(row.token_ids).count(tokenizer.token_id(END)) for row in rows] == [2, 3]
    assert not warnings


def test_rows_that_are_too_long(tmp_path: Path):
    lines = [{"prompt": "1" * n, "completion": "2" * n} for n in (2, 9, 4, 9)]  # and <bos> and <eos>
    path = write(tmp_path, *lines)
    assert len(load(path, CHARS, 20)[0]) == 4
    with pytest.raises(ValueError, match=r"2 of 4 rows are longer than model.context \(19 tokens\): .*:2 \(20\), .*:4"):
        load(path, CHARS, 19)
    with pytest.raises(ValueError, match=r"sft.max_tokens \(19 tokens\).*; shorten .* or set sft.too_long=cut"):
        load(path, CHARS, 19, max_tokens=19)
    rows, _ = load(path, CHARS, 12, too_long="cut")
    assert [CHARS.decode(row.token_ids) for row in rows][1] == "<bos>11111111122"
    assert [learned(row, CHARS) for row in rows] == [["22<eos>"], ["22"], ["2222<eos>"], ["22"]]
    with pytest.raises(ValueError, match=r"2 of 4 rows cut off, have nothing left to learn \(10 tokens\).*:2 \(20\)"):
        load(path, CHARS, 10, too_long="cut")


def test_later_turns_are_cut_off_whole(tmp_path: Path, tokenizer: HuggingFaceTokenizer):
    path = write(tmp_path, chat("a", "bb", "c", "dd"))
    (whole,), _ = load(path, tokenizer)
    for longest in range(whole.learned[0][0] + 1, len(whole.token_ids)):
        (row,), _ = load(path, tokenizer, longest, too_long="cut")
        assert list(row.token_ids) == list(whole.token_ids[:longest])
        assert marks(row) == marks(whole)[:longest]


def marks(row: Row) -> list[bool]:
    return [any(first <= i < end for first, end in row.learned) for i in range(len(row.token_ids))]


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=5))
def test_packed_rows_are_masked_where_they_are_learned(wanted: list[list[bool]]):
    rows = [Row(range(len(row)), spans(row)) for row in wanted]
    batch = pack_rows(rows)
    assert batch.mask.tolist() == [mark for row in wanted for mark in row]
    assert batch.tokens.tolist() == [i for row in wanted for i in range(len(row))]


def spans(row: Sequence[bool]) -> tuple[tuple[int, int], ...]:
    return tuple(m.span() for m in re.finditer("1+", "".join(str(int(mark)) for mark in row)))


GOOD = {"prompt": "1=?", "completion": "1"}
USER = {"role": "user", "content": "a"}
HOSTILE: list[tuple[object, str]] = [
    ({}, "rows.jsonl:2 | or 'prompt' and 'completion'"),
    ({**GOOD, "messages": [USER]}, "rows.jsonl:2 | either field 'messages'"),
    ({"prompt": "1=?"}, "field 'completion' | missing"),
    ({"completion": "1"}, "field 'prompt' | missing"),
    ({"prompt": "1=?", "completion": " \n"}, "field 'completion' | empty"),
    ({"prompt": "1=?", "completion": 8}, "field 'completion' | write it as a string"),
    ({"prompt": "1=?", "completion": "1\0"}, "field 'completion' | holds a NUL"),
    ({"prompt": "1=?", "completion": "\ufdd1\ufde0\ufdd2"}, "field 'completion': U+FDD1 at character 1 | character"),
    ({"prompt": "1\ufdd0", "completion": "1"}, "field 'prompt': U+FDD0 at character 2 | character"),
    ({"prompt": [], "completion": "1"}, "field 'prompt' | a list of messages"),
    ({**GOOD, "tools": []}, "field 'tools' | is not read"),
    ({"messages": "a"}, "field 'messages' | a list of messages"),
    ({"messages": []}, "field 'messages' | a list of messages"),
    ({"messages": ["a"]}, "field 'messages[0]' | message"),
    ({"messages": [USER]}, "field 'messages' | has no turn of the assistant's"),
    (chat("a", "b", first="assistant"), "field 'messages' | begins with the assistant"),
    (chat("a", "b", first="human"), "field 'messages[0].role' | choose one of system, user"),
    ({"messages": [{"role": ["user"], "content": "a"}]}, "field 'messages[0].role' | ['user']"),
    ({"messages": [{"content": "a"}]}, "field 'messages[0].role' | role"),
    (chat("a", ""), "field 'messages[1].content' | empty"),
    ({"messages": [USER, {"role": "assistant", "content": None}]}, "field 'messages[1].content' | missing"),
    (
        {"messages": [USER, {"role": "assistant", "content": "a", "tool_calls": []}]},
        "field 'messages[1].tool_calls' | write it into the content",
    ),
    (chat("a", "b\ufdd1"), "field 'messages[1].content': U+FDD1 | not a character (Unicode"),
    ("[1]", "rows.jsonl:2 | list"),
    ("{", "rows.jsonl:2 | not JSON"),
    ("[" * 100_000, "rows.jsonl:2 | not JSON"),
]


@pytest.mark.parametrize(("line", "message"), HOSTILE)
def test_damage_is_reported_with_file_line_and_field(
    tmp_path: Path, tokenizer: HuggingFaceTokenizer, line: object, message: str
):
    path = write(tmp_path, GOOD, line)
    with refused(message) as raised:
        load(path, tokenizer)
    assert str(raised.value).startswith(f"{path}:2: ")


def test_what_a_tokenizer_cannot_do_is_said(tmp_path: Path, tokenizer: HuggingFaceTokenizer):
    with pytest.raises(ValueError, match=r"rows.jsonl:1: field 'messages\[0\].content': character 'a' .* vocabulary"):
        load(write(tmp_path, chat("a", "b")), CHARS)
    with refused("rows.jsonl:1: field 'messages': data.tokenizer=chars | has no chat template"):
        load(write(tmp_path, chat("1", "2")), CHARS)
    with refused("rows.jsonl:1: field 'prompt': data.tokenizer=chars | has no chat template"):
        load(write(tmp_path, {"prompt": chat("1")["messages"], "completion": "2"}), CHARS)
    with pytest.raises(ValueError, match=r"field 'completion': character 'x' at position 0"):
        load(write(tmp_path, {"prompt": "1", "completion": "x"}), CHARS)
    plain = HuggingFaceTokenizer(write_tokenizer(tmp_path / "plain", with_bos=True), "Q: {prompt} A:")
    with refused("messages | need the chat template"):
        load(write(tmp_path, chat("a", "b")), plain)
    (row,), _ = load(write(tmp_path, {"prompt": "a", "completion": " b"}), plain)
    assert plain.decode(row.token_ids) == f"<bos>Q: a A: b{END}"
    picky = made(tmp_path / "picky", "{{ raise_exception('no system turns') if messages[0].role == 'system' }}" + CHAT)
    with pytest.raises(ValueError, match=r"rows.jsonl:1: field 'messages': the chat template .* no system turns"):
        load(write(tmp_path, chat("a", "b", first="system")), picky)


def test_no_rows(tmp_path: Path):
    with pytest.raises(InputError, match=r"sft.path=.*nothing.jsonl: no such file"):
        load(tmp_path / "nothing.jsonl", CHARS)
    with pytest.raises(ValueError, match=r"rows.jsonl: the file is empty"):
        load(write(tmp_path), CHARS)


def config(path: Path | None, seed: int = 0, **sft: object) -> Config:
    data = DataConfig(task="chain_sum", validation_size=8, test_size=8)
    own = SFTConfig(**{"path": path and str(path), "warmup_steps": 0, **sft})
    return Config(run=RunConfig(seed=seed), model=ModelConfig(context=64), data=data, sft=own)


def rows_of(path: Path, seed: int, **sft: Any) -> SupervisedRows:
    settings = SFTConfig(path=str(path), warmup_steps=0, **sft)
    return rows_of_file(settings, CHARS, (CHARS.eos_id,), 64, seed, print)


@settings(max_examples=40)
@given(count=st.integers(1, 9), batch_size=st.integers(1, 7), epochs=st.integers(1, 3), seed=st.integers(0, 3))
def test_epochs_hold_every_row_once_in_an_order_of_their_own(
    tmp_path_factory: pytest.TempPathFactory, count: int, batch_size: int, epochs: int, seed: int
):
    path = write(tmp_path_factory.mktemp("rows"), *({"prompt": str(i), "completion": str(i)} for i in range(count)))
    how = {"seed": seed, "batch_size": batch_size}
    made = rows_of(path, epochs=epochs, **how)
    steps = [made.of_step(step) for step in range(made.steps)]
    assert all(len(rows) == batch_size for rows in steps[:-1])
    assert 1 <= len(steps[-1]) <= batch_size
    drawn = [CHARS.decode(row.token_ids) for rows in steps for row in rows]
    for epoch in range(epochs):
        assert sorted(drawn[epoch * count : (epoch + 1) * count]) == [f"<bos>{i}{i}<eos>" for i in range(count)]
    assert len(drawn) == epochs * count
    by_steps = rows_of(path, steps=made.steps, **how)
    assert [by_steps.of_step(step) for step in range(made.steps - 1)] == steps[:-1]
    assert len(by_steps.of_step(made.steps - 1)) == batch_size
    assert made.of_step(0) == steps[0]


def test_orders_and_rows_are_told_apart(tmp_path: Path):
    lines = [{"prompt": str(i), "completion": str(i)} for i in range(9)]
    data = build_data(config(write(tmp_path, *lines), epochs=1))
    assert data.supervised is not None
    other_seed = build_data(config(tmp_path / "rows.jsonl", seed=1, epochs=1)).supervised
    assert other_seed.identity != data.supervised.identity
    assert other_seed.of_step(0) != data.supervised.of_step(0)
    again = build_data(config(write(tmp_path, *lines), epochs=1)).supervised
    assert again.identity == data.supervised.identity
    for other in ([*lines, lines[0]], [*lines[:8], {"prompt": "88", "completion": "8"}], [*lines[1:], lines[0]]):
        assert build_data(config(write(tmp_path, *other), epochs=1)).supervised.identity != again.identity
    (row,) = build_data(config(write(tmp_path, {"prompt": "12", "completion": "3"}), epochs=1)).supervised.of_step(0)
    (other,) = build_data(config(write(tmp_path, {"prompt": "1", "completion": "23"}), epochs=1)).supervised.of_step(0)
    assert list(row.token_ids) == list(other.token_ids)
    assert digest([row]) != digest([other])


def test_a_warm_up_that_never_ends_is_refused(tmp_path: Path):
    path = write(tmp_path, *[GOOD] * 9)
    with refused("sft.warmup_steps=5 | must be below the 5 steps that sft.epochs=2 of 9"):
        build_data(config(path, epochs=2, batch_size=4, warmup_steps=5))
    assert build_data(config(path, epochs=2, batch_size=4, warmup_steps=4)).supervised.steps == 5


def test_the_traces_of_the_task_are_learned_without_a_file():
    data = build_data(config(None, steps=3, batch_size=4))
    assert data.supervised.steps == 3
    for row in data.supervised.of_step(2):
        (text,) = learned(row, CHARS)
        assert text.startswith("<think>")
        assert text.endswith("</answer><eos>")
        assert CHARS.decode(row.token_ids[: row.learned[0][0]]).endswith("=?")
    assert build_data(config(None)).supervised is None


def test_what_follows_a_cut_has_no_space_in_front_that_nobody_wrote() -> None:
    """SentencePiece's tokenizers put one in front of a text that they encode on its own."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=60, initial_alphabet=[*"ab<>|0x\n"])
    tokenizer.train_from_iterator(["ab ab ab a<b a<b a<b b<a"], trainer)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text).ids

    for asks, answers in (("ab ", "ab"), ("a<", "b"), ("a", "b<a"), ("b<a", " ab")):
        asked, answered = encoded_parts([asks, asks + answers], encode)
        pieces = [tokenizer.id_to_token(i) for i in asked + answered]
        assert "".join(pieces).replace("\u2581", " ") == " " + asks + answers
