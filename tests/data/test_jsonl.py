"""JSON Lines problems: what is read, and how every kind of damage is reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from refusals import refused

from grpo_mega.data.problems import load_problems
from grpo_mega.data.tokenizer import CharTokenizer
from grpo_mega.errors import InputError

TOKENIZER = CharTokenizer()


def write(folder: Path, *lines: object) -> Path:
    path = folder / "problems.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_reads_problems(tmp_path: Path):
    path = write(
        tmp_path, {"prompt": "1+1=?", "answer": 2}, {"prompt": "<bos>2=?", "answer": " 2", "id": "x", "task": "echo"}
    )
    first, second = (problem.prompt for problem in load_problems(path, TOKENIZER))
    assert (first.id, first.text, first.answer, first.task) == ("problems/1", "<bos>1+1=?", "2", "jsonl")
    assert first.token_ids == tuple(TOKENIZER.encode("<bos>1+1=?"))
    assert (second.id, second.text, second.answer, second.task) == ("x", "<bos>2=?", " 2", "echo")


def test_last_newline_is_optional_and_other_fields_are_ignored(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "1=?", "answer": "1", "level": 3}\r\n{"prompt": "2=?", "answer": "2"}')
    assert [p.prompt.answer for p in load_problems(path, TOKENIZER)] == ["1", "2"]


def test_blank_lines_at_the_end_and_a_byte_order_mark_are_no_problems(tmp_path: Path):
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "1=?", "answer": "1"}\r\n{"prompt": "2=?", "answer": "2"}\r\n\r\n  \n\n')
    assert [(p.prompt.id, p.prompt.answer) for p in load_problems(path, TOKENIZER)] == [
        ("windows/1", "1"),
        ("windows/2", "2"),
    ]


def test_a_blank_line_between_problems_is_named(tmp_path: Path):
    path = write(tmp_path, GOOD, "", " ", {**GOOD, "id": "x"}, "")
    with refused("problems.jsonl:2 | and others follow"):
        load_problems(path, TOKENIZER)


def test_a_surrogate_pair_is_a_character(tmp_path: Path):
    path = write(tmp_path, {"prompt": "1=?", "answer": "\U0001f600"})
    assert "\\ud83d\\ude00" in path.read_text()
    assert load_problems(path, TOKENIZER)[0].prompt.answer == "\U0001f600"


def test_answers_that_nothing_can_reach_are_counted_and_named(tmp_path: Path):
    lines = [{"prompt": "1=?", "answer": answer} for answer in ("1", "bad 2", "3", "bad 4", "bad 5", "bad 6")]
    path = write(tmp_path, *lines)
    with pytest.raises(ValueError, match="no completion can be right for 4 of 6 problems") as raised:
        load_problems(path, TOKENIZER, lambda answer: f"is {answer}; fix it" if answer.startswith("bad") else None)
    assert str(raised.value).splitlines()[1:] == [
        f"  {path}:{number}: field 'answer' is bad {number}; fix it" for number in (2, 4, 5)
    ]


def test_only_newline_ends_a_line(tmp_path: Path):
    path = write(tmp_path, json.dumps({"prompt": "1=?", "answer": "a\u2028b"}, ensure_ascii=False))
    assert load_problems(path, TOKENIZER)[0].prompt.answer == "a\u2028b"


GOOD = {"prompt": "1=?", "answer": "1"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"answer": "1"}, "field 'prompt' | missing"),
        ({"prompt": "1=?"}, "field 'answer' | missing"),
        ({"prompt": "1=?", "answer": None}, "field 'answer' | missing"),
        ({"prompt": "1=?", "answer": True}, "field 'answer' | True is not a"),
        ({"prompt": "1=?", "answer": 0.5}, "field 'answer' | write it as a string"),
        ({"prompt": 3, "answer": "1"}, "field 'prompt' | 3 is not a"),
        ({"prompt": " ", "answer": "1"}, "field 'prompt' | empty"),
        ({"prompt": "1=?", "answer": ""}, "field 'answer' | empty"),
        ({"prompt": "1=x", "answer": "1"}, "field 'prompt': character 'x' at position 7 | not in the vocabulary"),
        ({"prompt": "1=?", "answer": "1", "id": 7}, "field 'id' | 7 is not a"),
        ({"prompt": "1=?", "answer": "1", "task": ""}, "field 'task' | empty"),
        ("[1]", "problems.jsonl:2 | list"),
        ("{", "problems.jsonl:2 | not JSON"),
        (
            {"prompt": "1=?\ud800", "answer": "1"},
            "field 'prompt' | holds half of a surrogate pair (\\ud800) at",
        ),
        (
            {"prompt": "1=?", "answer": "\udfff"},
            "field 'answer' | holds half of a surrogate pair (\\udfff) at",
        ),
        ({"prompt": "1=?", "answer": "1", "id": "\ud800"}, "field 'id' | holds half of a surrogate pair"),
        ({"prompt": "1\0=?", "answer": "1"}, "field 'prompt' | holds a NUL at character 2"),
        ("[" * 100_000, "problems.jsonl:2 | not JSON"),
        ('{"prompt": "1=?", "answer": ' + "9" * 5000 + "}", "problems.jsonl:2 | not JSON"),
    ],
)
def test_damage_is_reported_with_file_line_and_field(tmp_path: Path, line: object, message: str):
    path = write(tmp_path, GOOD, line)
    with refused(message) as raised:
        load_problems(path, TOKENIZER)
    assert str(raised.value).startswith(f"{path}:2: ")


@pytest.mark.parametrize("second", [{**GOOD, "id": "a"}, {**GOOD, "id": "problems/1"}])
def test_duplicate_ids(tmp_path: Path, second: dict):
    first = {**GOOD, "id": "a"} if second["id"] == "a" else GOOD
    with pytest.raises(ValueError, match=r"problems.jsonl:2: field 'id'.*already used"):
        load_problems(write(tmp_path, first, second), TOKENIZER)


def test_not_utf8(tmp_path: Path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"prompt": "\xe9"}\n')
    with pytest.raises(ValueError, match=r"latin.jsonl:2: not UTF-8 at byte 12"):
        load_problems(path, TOKENIZER)


def test_empty_file(tmp_path: Path):
    for lines in ([], ["", " "]):
        with pytest.raises(ValueError, match=r"problems.jsonl: the file is empty"):
            load_problems(write(tmp_path, *lines), TOKENIZER)


def test_missing_file(tmp_path: Path):
    with pytest.raises(InputError, match=r"nothing.jsonl: no such file"):
        load_problems(tmp_path / "nothing.jsonl", TOKENIZER)
    with refused(f"{tmp_path} | no file belongs to the split 'train'"):
        load_problems(tmp_path, TOKENIZER)
