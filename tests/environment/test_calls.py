"""Calls of tools, and episodes that answer them."""

from __future__ import annotations

import json
import re
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import REPOSITORY

from grpo_mega.environment import episode
from grpo_mega.environment.calls import BadCall, load, read_call
from grpo_mega.errors import InputError
from grpo_mega.types import Call, Prompt, Sample

COUNTER, PAIR = "made_environments:Counter", "made_environments:double,made_environments:join"
ROW = {"answer": "5"}


@pytest.mark.parametrize(
    ("path", "content", "expected"),
    [
        (COUNTER, "37*48", ("tell", {"number": "37*48"})),
        (COUNTER, ' {"name": "tell", "arguments": {"number": "1"}} ', ("tell", {"number": "1"})),
        ("made_environments:double", " 4 ", ("double", {"number": 4})),
        ("made_environments:join", "a", ("join", {"first": "a"})),
        (PAIR, '{"name": "double", "arguments": {"number": 4}}', ("double", {"number": 4})),
        (PAIR, '{"name": "join", "arguments": {"first": "a", "second": "b"}}', ("join", {"first": "a", "second": "b"})),
    ],
)
def test_calls(path: str, content: str, expected: Any) -> None:
    assert read_call(content, load(path)) == expected


@pytest.mark.parametrize(
    ("path", "content", "words"),
    [
        (PAIR, "4", "not a call"),
        (PAIR, '{"name": "reset"}', "no tool 'reset'; the tools are double, join"),
        (COUNTER, '{"name": "reset"}', "no tool 'reset'"),
        (COUNTER, '{"name": "__init__"}', "no tool"),
        (PAIR, '{"name": "double"}', "missing a required argument: 'number'"),
        (PAIR, '{"name": "double", "arguments": {"number": 1, "other": 2}}', "unexpected keyword argument 'other'"),
        (PAIR, '{"name": "double", "arguments": [4]}', "not a JSON object"),
        ("made_environments:double", "four", "number cannot be 'four'"),
        ("made_environments:double", "9" * 5000, "number cannot be"),
        (PAIR, "[" * 10**5, "not a call"),
    ],
)
def test_bad_calls_are_told_what_is_wrong(path: str, content: str, words: str) -> None:
    with pytest.raises(BadCall, match=words):
        read_call(content, load(path))


@given(st.text())
def test_any_text_is_a_call_or_a_bad_one(content: str) -> None:
    for path in (COUNTER, PAIR, "made_environments:double"):
        kind = load(path)
        try:
            name, arguments = read_call(content, kind)
        except BadCall:
            continue
        assert name in kind.tools
        assert arguments


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("made_environments", "not a path"),
        ("made_environments:Nothing", "no class or function Nothing"),
        (f"{COUNTER},made_environments:double", "a class beside others"),
        ("fractions:Fraction", "has no method reset"),
        ("bad_environments:Untyped", "the parameter number of guess has no type"),
        ("bad_environments:Idle", "has no tools"),
    ],
)
def test_what_cannot_be_an_environment_is_refused(path: str, what: str) -> None:
    with pytest.raises(InputError, match=what) as refused:
        load(path)
    assert refused.value.fix
    assert "environment.path" in refused.value.field


@given(st.lists(st.text(alphabet="0123456789", max_size=3), min_size=1, max_size=6), st.sets(st.integers(0, 5)))
def test_replies_do_not_depend_on_whether_the_object_was_kept(calls: list[str], lost: set[int]) -> None:
    episode._kept.clear()
    expected = [episode.answer(ROW, "kept", "3/p", calls[: number + 1], COUNTER) for number in range(len(calls))]
    for number, reply in enumerate(expected):
        if number in lost:
            episode._kept.clear()
        assert episode.answer(ROW, "again", "3/p", calls[: number + 1], COUNTER) == reply
    assert expected[0]["text"].startswith("1")
    assert expected[-1]["text"].startswith(str(len(calls)))


def test_the_example_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = re.findall(
        r"```python\n(# bisect_game.py\n.*?)```", (REPOSITORY / "docs/environments.md").read_text(), re.S
    )
    (tmp_path / "bisect_game.py").write_text(program)
    monkeypatch.syspath_prepend(str(tmp_path))
    calls = [json.dumps({"name": "guess", "arguments": {"number": number}}) for number in (16, 24, 20)]
    replies = [episode.answer({"answer": "20"}, "k", "s", calls[: n + 1], "bisect_game:Bisect") for n in range(3)]
    assert [reply["text"] for reply in replies] == ["higher", "lower", "right"]
    for done, expected in ((2, 0.0), (3, 1.0)):
        asked = tuple(Call(call, False) for call in calls[:done])
        sample = Sample(Prompt("p", (1,), "", "20", ""), 0, array("i"), array("f"), "stop", (), "", calls=asked)
        assert episode.score(sample, "bisect_game:Bisect", 0) == expected


def test_objects_of_old_episodes_are_dropped() -> None:
    for number in range(episode.KEPT + 10):
        episode.answer(ROW, str(number), "s", ["1"], COUNTER)
    assert len(episode._kept) == episode.KEPT


@pytest.mark.parametrize("what", ["raise", "none", "bytes", "nan"])
def test_what_a_tool_raises_or_returns_is_text_for_the_model(what: str) -> None:
    reply = episode.answer({}, what, "s", [what], "made_environments:Broken")
    assert isinstance(reply["text"], str)
    assert reply["error"] == (what == "raise")
