"""tools/data.py as a command: what it counts, what it finds in test sets, and what it leaves out."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import random
import string
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import limit
from made_tokenizer import write_tokenizer
from ranks import REPOSITORY

from grpo_mega.data.problems import load_problems
from grpo_mega.data.tokenizer import CharTokenizer
from grpo_mega.recipes.curation.similar_texts import Grams, Match, Near, _likeness, _runs, words

QUESTION = (
    "A farmer sells {} boxes of apples on Monday and {} boxes on Tuesday; how many boxes does the farmer sell in all?"
)


SPEC = importlib.util.spec_from_file_location("data_tool", REPOSITORY / "tools" / "data.py")
assert SPEC
assert SPEC.loader
TOOL = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(TOOL)


def tool(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command, without the second that a process of its own takes to start."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = TOOL.main([*map(str, arguments)])
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def counted(*arguments: object) -> dict[str, Any]:
    done = tool(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_lengths_answers_repetitions_and_unusable_rows_are_counted(tmp_path: Path) -> None:
    answers = ["7", "-1,000", "0.5", "3/4", "(B)", "\\frac{1}{2}", "Paris", "in the year 5"]
    rows = [{"q": "x" * (10 * (i + 1)), "a": {"b": f"It is\n#### {answer}"}} for i, answer in enumerate(answers)]
    rows += [{"q": "X" * 10 + " ", "a": {"b": "#### 7"}}, {"q": "none", "a": {}}, {"q": "no", "a": {"b": "7"}}]
    path = write(tmp_path / "a.jsonl", rows)
    tokenizer = write_tokenizer(tmp_path / "tokenizer", with_bos=True)
    columns = ["--prompt", "q", "--answer", "a.b", "--answer-pattern", "#### (.*)", "--tokenizer", tokenizer]
    found = counted(path, *columns)
    assert (found["rows"], found["unusable"], found["repeated"]) == (11, 2, 1)
    assert found["reasons"][0].startswith(f"{path}:10: field 'a.b': missing; the columns are q, a; ")
    assert found["reasons"][1].startswith(f"{path}:11: field 'a.b': ends with '7', and nothing in it matches")
    assert found["characters"] == {"min": 10, "median": 40, "p99": 80, "max": 80}
    assert found["tokens"]["max"] == 80  # nothing in its training text joins x and x
    kinds = {"whole number": 3, "decimal": 1, "fraction": 1, "letter": 1, "LaTeX": 1, "one word": 1, "text": 1}
    assert found["answers"] == kinds
    printed = tool(path, *columns).stdout
    assert "11 rows, 2 of them unusable" in printed
    assert "characters: 10 to 80, half at most 40, 99 % at most 80" in printed


def test_what_shares_words_with_a_test_problem_is_shown_and_left_out(tmp_path: Path) -> None:
    rows = [{"prompt": QUESTION.format(i, i + 1), "answer": i, "n": i} for i in range(3)]
    rows += [{"prompt": f"What is {i} times {i}?", "answer": i * i, "n": i} for i in range(5)] * 2
    rows += [{"prompt": [{"role": "user", "content": f"Please! {QUESTION.format(8, 9)}".upper()}], "answer": 1}]
    train = write(tmp_path / "train.jsonl", rows)
    near = "On Sunday " + QUESTION.format(2, 3).removeprefix("A farmer sells 2 boxes of apples ")
    tests = [{"question": QUESTION.format(8, 9)}, {"question": "what is 3 times 3"}, {"question": near}]
    test = write(tmp_path / "test.jsonl", tests)
    words = [train, "--against", test, "--test-prompt", "question"]
    output = tmp_path / "clean.jsonl"
    found = counted(*words, "--unique", "--output", output)
    # The upper-case copy, the one that shares the end of the sentence with its number, and both of 3 times 3.
    assert (found["contaminated"], found["repeated"]) == (4, 5)
    assert {(pair["share"], pair["row"].rpartition(":")[2], pair["test"]) for pair in found["worst"][:3]} == {
        (1.0, "14", f"{test}:1"),
        (1.0, "7", f"{test}:2"),
        (1.0, "12", f"{test}:2"),
    }
    (partly,) = found["worst"][3:]
    assert partly["row"] == f"{train}:3"
    assert 0 < partly["share"] < 1
    kept = [json.loads(line) for line in output.read_text().splitlines()]
    assert kept == [rows[i] for i in (0, 1, 3, 4, 5, 7)]
    assert found["written"] == 6
    assert counted(output, *words[1:])["contaminated"] == 0
    assert counted(*words, "--words", 50)["contaminated"] == 3  # whole problems only
    assert f"100% of {test}:1 in {train}:14: 'PLEASE!" in tool(*words).stdout


def test_an_id_that_occurs_twice_in_a_file_is_unusable(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}?", "answer": i, "id": f"n{i % 3}"} for i in range(4)]
    path, other = write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl", rows[:2])
    found = counted(path, other, "--id", "id", "--output", tmp_path / "clean.jsonl")
    assert (found["rows"], found["unusable"], found["written"]) == (6, 1, 5)  # another file may have the same ids
    assert found["reasons"] == [f"{path}:4: field 'id': 'n0' was already used; make ids unique"]
    named = write(tmp_path / "c.jsonl", [{"prompt": f"{i}?", "answer": i, "number": i % 2} for i in range(3)])
    assert counted(named)["unusable"] == 0
    assert counted(named, "--id", "number")["reasons"] == [
        f"{named}:3: field 'number': '0' was already used; make ids unique"
    ]


def test_ids_are_not_checked_unless_their_column_is_named(tmp_path: Path) -> None:
    """Training from a named source does not read a column that happens to be called id."""
    rows = [{"prompt": f"{i}?", "answer": i, "id": own} for i, own in enumerate([7, 7, None, "a", "a", ["b"]])]
    path, output = write(tmp_path / "a.jsonl", rows), tmp_path / "clean.jsonl"
    found = counted(path, "--output", output)
    assert (found["unusable"], found["written"]) == (0, 6)
    assert [json.loads(line) for line in output.read_text().splitlines()] == rows
    assert len(load_problems(path, CharTokenizer(), name="source")) == 6
    assert counted(path, "--id", "id")["unusable"] == 4


def test_near_duplicates_of_earlier_problems_are_shown_and_left_out(tmp_path: Path) -> None:
    noise = random.Random(0)
    texts = [" ".join(noise.choice(string.ascii_lowercase) * 3 for _ in range(60)) for _ in range(4)]
    planted = texts[0].split()
    planted[30] = "planted"  # 5 of 56 runs of 5 words are others
    rows = [*texts, " ".join(planted), texts[1].upper()]
    train = write(tmp_path / "train.jsonl", [{"prompt": text, "answer": 1, "n": i} for i, text in enumerate(rows)])
    output = tmp_path / "clean.jsonl"
    words = [train, "--unique", "--output", output]
    found = counted(*words)
    assert (found["near"], found["repeated"], found["written"]) == (0, 1, 5)
    found = counted(*words, "--near", 0.8)
    assert (found["near"], found["repeated"]) == (1, 1)
    (pair,) = found["near_pairs"]
    assert (pair["likeness"], pair["row"], pair["earlier"]) == (51 / 61, f"{train}:5", f"{train}:1")
    assert [json.loads(line)["n"] for line in output.read_text().splitlines()] == [0, 1, 2, 3]
    assert counted(*words, "--near", 0.9)["near"] == 0
    assert "84% alike" in tool(*words, "--near", 0.8).stdout


def test_no_row_is_left_out_for_its_likeness_to_one_that_is_left_out(tmp_path: Path) -> None:
    """Of a chain in which each row is like the next only, every second one is enough."""
    vocabulary = [f"w{i}" for i in range(40 * 6 + 100)]
    rows = [{"prompt": " ".join(vocabulary[6 * i : 6 * i + 100]), "answer": 1, "n": i} for i in range(40)]
    train, output = write(tmp_path / "train.jsonl", rows), tmp_path / "clean.jsonl"
    found = counted(train, "--near", 0.8, "--unique", "--output", output)
    assert [json.loads(line)["n"] for line in output.read_text().splitlines()] == [*range(0, 40, 2)]
    assert (found["near"], found["written"]) == (20, 20)
    assert counted(train, "--near", 0.8)["near"] == 39  # all are kept, and all but the first are like one of them
    test = write(tmp_path / "test.jsonl", rows[:1])
    counted(train, "--near", 0.8, "--unique", "--against", test, "--words", 100, "--output", output)
    assert [json.loads(line)["n"] for line in output.read_text().splitlines()] == [*range(1, 40, 2)]


def test_it_is_a_command(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "1?", "answer": 1}])
    command = [sys.executable, REPOSITORY / "tools" / "data.py", path, "--json"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "kernels")))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit(120))
    assert (done.returncode, json.loads(done.stdout)["rows"]) == (0, 1), done.stderr


def test_what_fails_leaves_the_output_as_it_was(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}?", "answer": i} for i in range(3)]
    path, output = write(tmp_path / "a.jsonl", rows), tmp_path / "clean.jsonl"
    assert tool(path, "--output", output).returncode == 0
    before = output.read_text()
    with path.open("a") as file:
        file.write("{")
    done = tool(path, "--output", output)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {path}:4: not JSON")
    assert output.read_text() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.jsonl", "clean.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.jsonl"], "absent.jsonl: no such file or folder"),
        ([".", "--unique"], "--unique: has no effect without --output"),
        ([".", "--output", "x.txt"], "give it the ending .jsonl"),
        ([".", "--words", "0"], "--words 0: too few; choose 1 or more"),
        ([".", "--near", "0.4"], "choose a value in [0.5, 1]"),
        ([".", "--answer-pattern", "("], "--answer-pattern '(': not a regular expression"),
    ],
)
def test_senseless_arguments_are_refused(arguments: list[str], message: str) -> None:
    done = tool(*arguments)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr


WORDS = st.lists(st.sampled_from("abcd"), min_size=0, max_size=30)


@settings(max_examples=300)
@given(test=WORDS, train=WORDS, n=st.integers(1, 15))
def test_a_problem_is_found_exactly_when_it_shares_a_run(test: list[str], train: list[str], n: int) -> None:
    length = min(n, len(test))
    runs = {tuple(test[i : i + length]) for i in range(len(test) - length + 1)} if test else set()
    there = {tuple(train[i : i + length]) for i in range(len(train) - length + 1)}
    if length < min(8, n) and len(train) != length:
        there = set()
    match = Grams([("t", " ".join(test))], n).worst(" ".join(train))
    assert (match.share if match else 0) == (len(runs & there) / len(runs) if runs else 0)


def test_a_share_is_of_the_test_problem_that_is_nearest() -> None:
    noise = random.Random(0)
    texts = [[noise.choice("abcdefghij") for _ in range(40)] for _ in range(20)]
    grams = Grams([(str(i), " ".join(text)) for i, text in enumerate(texts)], 13)
    match = grams.worst(" ".join([*texts[3][:20], "z", *texts[8][5:40]]))
    assert match
    assert (match.test, match.share) == ("8", 23 / 28)


def test_signs_tell_texts_apart_and_punctuation_does_not() -> None:
    assert words("What is $3+5$?") == words("what is (3 + 5)!") == ["what", "is", "3", "+", "5"]
    assert words("3-5") != words("3+5")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\u5c0f\u660e\u67093\u4e2a\u82f9\u679c\u3002", [*"\u5c0f\u660e\u6709", "3", *"\u4e2a\u82f9\u679c"]),
        ("\u308a\u3093\u3054\u304c12\u500b", [*"\u308a\u3093\u3054\u304c", "12", "\u500b"]),
        ("\u0e40\u0e02\u0e32 x^2", [*"\u0e40\u0e02\u0e32", "x", "^", "2"]),
        ("\uc0ac\uacfc 3\uac1c", ["\uc0ac\uacfc", "3\uac1c"]),  # Korean has spaces
    ],
)
def test_characters_are_words_where_a_script_has_no_spaces(text: str, expected: list[str]) -> None:
    assert words(text) == expected


STOCK = "\u5982\u56fe\u6240\u793a\u5728\u76f4\u89d2\u4e09\u89d2\u5f62\u4e2d\u5df2\u77e5\u89d2"
"""As shown, in a right triangle, let the angle: 14 characters."""
LONGER = (
    "\u5728\u5e73\u9762\u76f4\u89d2\u5750\u6807\u7cfb\u4e2d\u5df2"
    "\u77e5\u70b9\u7684\u5750\u6807\u662f\u6b63\u6574\u6570\u4e14"
)
"""In the plane let the coordinates of a point be positive integers, and: 20 characters."""
LEG = (
    "\u7532\u7b49\u4e8e\u4e09\u5341\u5ea6\u659c\u8fb9\u957f\u4e3a\u516b\u5398\u7c73"
    "\u6c42\u8f83\u77ed\u7684\u4e00\u6761\u76f4\u89d2\u8fb9\u7684\u957f\u5ea6"
)
"""... A be 30 degrees and the hypotenuse 8 centimetres. How long is the shorter leg?"""
AREA = (
    "\u4e59\u7684\u6b63\u5f26\u7b49\u4e8e\u4e94\u5206\u4e4b\u4e09\u5468\u957f\u662f"
    "\u4e8c\u5341\u56db\u5398\u7c73\u95ee\u5b83\u7684\u9762\u79ef\u662f\u591a\u5c11"
)
"""... B have the sine 3/5 and the perimeter be 24 centimetres. What is the area?"""


@pytest.mark.parametrize("phrase", [STOCK[:13], STOCK, LONGER[:17], LONGER])
def test_a_stock_phrase_of_a_script_without_spaces_is_no_copy(phrase: str) -> None:
    assert Grams([("t", phrase + LEG)], 13).worst(phrase + AREA) is None


def test_a_copy_of_a_problem_in_a_script_without_spaces_is_detected() -> None:
    problem = STOCK + LEG
    grams = Grams([("t", problem), ("short", LEG[:20])], 13)
    assert grams.worst(f"{AREA}\u3002{problem}\uff1f") == Match("t", 1.0)
    part = grams.worst(AREA + problem[:26])  # 13 words
    assert part == Match("t", 1 / (len(problem) - 25))
    assert grams.worst(AREA + problem[:25]) is None
    assert grams.worst(AREA + LEG[:20]) == Match("short", 1.0)  # a whole problem of 10 words
    stock = Grams([("t", STOCK)], 13)  # 7 words: among texts of the same words only
    assert stock.worst(f" {STOCK}\u3002") == Match("t", 1.0)
    assert stock.worst(STOCK + AREA) is None


MIXED = st.lists(st.sampled_from(["a", "b", "\u5982", "\u56fe"]), max_size=30)


@settings(max_examples=300)
@given(test=MIXED, train=MIXED, n=st.integers(1, 6))
def test_a_piece_of_mixed_scripts_is_found_exactly_when_it_is_long_enough(
    test: list[str], train: list[str], n: int
) -> None:
    pieces = [
        {tuple(text[i:j]) for i in range(len(text)) for j in range(i + 1, len(text) + 1)} for text in (test, train)
    ]
    half_words = [sum(1 + word.isascii() for word in piece) for piece in pieces[0] & pieces[1]]
    same = bool(test) and test == train
    match = Grams([("t", " ".join(test))], n).worst(" ".join(train))
    assert (match is not None) == (same or max(half_words, default=0) >= 2 * n)


def likeness_of(one: list[str], other: list[str]) -> float:
    """The Jaccard index of runs of five words, or of the whole of a shorter text."""
    runs = [{tuple(w[i : i + 5]) for i in range(max(len(w) - 4, 1))} if w else set() for w in (one, other)]
    return len(runs[0] & runs[1]) / max(len(runs[0] | runs[1]), 1)


@settings(max_examples=300)
@given(one=WORDS, other=WORDS)
def test_likeness_is_the_part_of_runs_that_both_have(one: list[str], other: list[str]) -> None:
    assert _likeness(_runs(" ".join(one)), _runs(" ".join(other))) == likeness_of(one, other)


@settings(max_examples=100)
@given(texts=st.lists(WORDS, max_size=8), least=st.sampled_from([0.5, 0.8, 1.0]))
def test_what_is_near_is_as_like_as_it_is_called_and_an_equal_text_is_always_near(
    texts: list[list[str]], least: float
) -> None:
    near = Near(least)
    for number, text in enumerate(texts):
        match = near.match(" ".join(text))
        if match:
            assert match.share == likeness_of(text, texts[int(match.test)]) >= least
        assert bool(text and text in texts[:number]) <= (match is not None and match.share == 1)
        near.add(str(number), " ".join(text))


def test_of_a_thousand_near_duplicates_among_other_texts_none_is_missed() -> None:
    noise = random.Random(1)
    near = Near(0.8)
    texts = [[noise.choice("abcdefghijklmnop") for _ in range(100)] for _ in range(1000)]
    for number, text in enumerate(texts):
        near.add(str(number), " ".join(text))
    missed = 0
    for number, text in enumerate(texts):
        at = noise.randrange(100)
        match = near.match(" ".join([*text[:at], "planted", *text[at + 1 :]]))
        missed += match is None or match.test != str(number)
    assert missed == 0
