"""JSON Lines problems: what is read, and how every kind of damage is reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_mega.data.jsonl import load_jsonl
from grpo_mega.data.tokenizer import CharTokenizer

TOKENIZER = CharTokenizer()


def write(folder: Path, *lines: object) -> Path:
    path = folder / "problems.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_reads_problems(tmp_path: Path):
    path = write(
        tmp_path, {"prompt": "1+1=?", "answer": 2}, {"prompt": "<bos>2=?", "answer": " 2", "id": "x", "task": "echo"}
    )
    first, second = load_jsonl(path, TOKENIZER)
    assert (first.id, first.text, first.answer, first.task) == ("problems/1", "<bos>1+1=?", "2", "jsonl")
    assert first.token_ids == tuple(TOKENIZER.encode("<bos>1+1=?"))
    assert (second.id, second.text, second.answer, second.task) == ("x", "<bos>2=?", " 2", "echo")


def test_last_newline_is_optional_and_other_fields_are_ignored(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "1=?", "answer": "1", "level": 3}\r\n{"prompt": "2=?", "answer": "2"}')
    assert [p.answer for p in load_jsonl(path, TOKENIZER)] == ["1", "2"]


def test_only_newline_ends_a_line(tmp_path: Path):
    path = write(tmp_path, json.dumps({"prompt": "1=?", "answer": "a\u2028b"}, ensure_ascii=False))
    assert load_jsonl(path, TOKENIZER)[0].answer == "a\u2028b"


GOOD = {"prompt": "1=?", "answer": "1"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"answer": "1"}, "field 'prompt' is missing"),
        ({"prompt": "1=?"}, "field 'answer' is missing"),
        ({"prompt": "1=?", "answer": None}, "field 'answer' is missing"),
        ({"prompt": "1=?", "answer": True}, "field 'answer' is True"),
        ({"prompt": "1=?", "answer": 0.5}, "field 'answer' is 0.5; write it as a string"),
        ({"prompt": 3, "answer": "1"}, "field 'prompt' is 3"),
        ({"prompt": " ", "answer": "1"}, "field 'prompt' is empty"),
        ({"prompt": "1=?", "answer": ""}, "field 'answer' is empty"),
        ({"prompt": "1=x", "answer": "1"}, "field 'prompt': character 'x' at position 7"),
        ({"prompt": "1=?", "answer": "1", "id": 7}, "field 'id' is 7"),
        ({"prompt": "1=?", "answer": "1", "task": ""}, "field 'task' is empty"),
        ("[1]", "object is needed, not list"),
        ("{", "not JSON"),
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"prompt": "1=?", "answer": ' + "9" * 5000 + "}", "not JSON"),
    ],
)
def test_damage_is_reported_with_file_line_and_field(tmp_path: Path, line: object, message: str):
    path = write(tmp_path, GOOD, line)
    with pytest.raises(ValueError, match=message) as raised:
        load_jsonl(path, TOKENIZER)
    assert str(raised.value).startswith(f"{path}:2: ")


@pytest.mark.parametrize("second", [{**GOOD, "id": "a"}, {**GOOD, "id": "problems/1"}])
def test_duplicate_ids(tmp_path: Path, second: dict):
    first = {**GOOD, "id": "a"} if second["id"] == "a" else GOOD
    with pytest.raises(ValueError, match=r"problems.jsonl:2: field 'id'.*already used"):
        load_jsonl(write(tmp_path, first, second), TOKENIZER)


def test_not_utf8(tmp_path: Path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"prompt": "\xe9"}\n')
    with pytest.raises(ValueError, match=r"latin.jsonl:2: not UTF-8 at byte 12"):
        load_jsonl(path, TOKENIZER)


def test_empty_file(tmp_path: Path):
    with pytest.raises(ValueError, match=r"problems.jsonl: the file is empty"):
        load_jsonl(write(tmp_path), TOKENIZER)


def test_missing_file(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"nothing.jsonl: no such file"):
        load_jsonl(tmp_path / "nothing.jsonl", TOKENIZER)
    with pytest.raises(FileNotFoundError, match="no such file"):
        load_jsonl(tmp_path, TOKENIZER)
