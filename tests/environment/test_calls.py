"""Calls of tools, and episodes that answer them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import without_waiting
from hypothesis import given
from hypothesis import strategies as st
from ranks import REPOSITORY

from grpo_mega.environment.calls import (
    FORMS,
    BadCall,
    argument_alone,
    calls_in,
    calls_of_sglang,
    form_of,
    last_calls,
    load,
    read_call,
    schemas,
)
from grpo_mega.environment.episode import KEPT, _kept
from grpo_mega.errors import InputError
from grpo_mega.reward.verdict import NoVerdict

COUNTER, PAIR = "made_environments:Counter", "made_environments:double,made_environments:join"
DOUBLE = ("double", {"number": 4})
TYPED, TAKEN = "made_environments:take", ("take", {"how": "up", "most": None, "of": ["a"]})
ROW = {"answer": "5"}
LONGEST = 1000


@pytest.mark.parametrize(
    ("path", "content", "expected"),
    [
        (COUNTER, "37*48", ("tell", {"number": "37*48"})),
        (COUNTER, ' {"name": "tell", "arguments": {"number": "1"}} ', ("tell", {"number": "1"})),
        ("made_environments:double", " 4 ", DOUBLE),
        ("made_environments:join", "a", ("join", {"first": "a"})),
        ("made_environments:note", "a", ("note", {"text": "a"})),
        (PAIR, '{"name": "double", "arguments": {"number": 4}}', DOUBLE),
        (PAIR, '{"name": "join", "arguments": {"first": "a", "second": "b"}}', ("join", {"first": "a", "second": "b"})),
        (PAIR, 'function<｜tool▁sep｜>double\n```json\n{"number": 4}\n```', DOUBLE),
        (PAIR, 'double<｜tool▁sep｜>{"number": 4}', DOUBLE),
        (TYPED, 'take<｜tool▁sep｜>{"how": "up", "most": 2}', ("take", {"how": "up", "most": 2})),
        (TYPED, '{"name": "take", "arguments": {"how": "up", "most": null, "of": ["a"]}}', TAKEN),
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
        (PAIR, '{"name": "double", "arguments": {"number": "4"}}', 'number must be int, and is "4"'),
        (PAIR, "double<｜tool▁sep｜>{4}", "not a JSON object"),
        (TYPED, 'take<｜tool▁sep｜>{"how": "left"}', "how must be"),
        (TYPED, 'take<｜tool▁sep｜>{"how": "up", "most": true}', "most must be"),
        (TYPED, 'take<｜tool▁sep｜>{"how": "up", "of": ["a", 1]}', "of must be"),
    ],
)
def test_bad_calls_are_told_what_is_wrong(path: str, content: str, words: str) -> None:
    with pytest.raises(BadCall, match=words):
        read_call(content, load(path))


FOUR, FIVE = (f'function<｜tool▁sep｜>double\n```json\n{{"number": {n}}}\n```<｜tool▁call▁end｜>' for n in (4, 5))
BEGIN = "<｜tool▁call▁begin｜>"


@pytest.mark.parametrize(
    ("turn", "opened", "calls"),
    [
        (f"Hm.<｜tool▁calls▁begin｜>{BEGIN}{FOUR}\n{BEGIN}{FIVE}", BEGIN, [4, 5]),
        (f"{BEGIN}{FOUR}{BEGIN}{FIVE}", BEGIN, [4, 5]),
        (f"{BEGIN}{FIVE} No. {BEGIN}{FOUR}", BEGIN, [4]),
        (f"Not {FIVE}, but {BEGIN}{FOUR}", BEGIN, [4]),
        (FOUR, BEGIN, [4]),
        ('[TOOL_CALLS][{"name": "double", "arguments": {"number": 4}}]', "[TOOL_CALLS]", [4]),
        (
            '[{"name": "double", "arguments": {"number": 5}}, {"name": "double", "arguments": {"number": 4}}]',
            "",
            [5, 4],
        ),
    ],
)
def test_several_calls_of_a_turn_are_made_in_order(turn: str, opened: str, calls: list[int]) -> None:
    content = last_calls(turn, opened)
    assert [read_call(call, load(PAIR)) for call in calls_in(content)] == [("double", {"number": n}) for n in calls]
    said = without_waiting.reply(ROW, "k", "s", [content], PAIR, LONGEST)
    assert said["text"].splitlines() == [str(2 * n) for n in calls]
    assert not said["error"]


def test_a_wrong_call_among_several_is_an_error_and_the_others_are_made() -> None:
    said = without_waiting.reply(ROW, "k", "s", [f"{FOUR}no<｜tool▁call▁end｜>{FIVE}"], PAIR, LONGEST)
    assert [line[:6] for line in said["text"].splitlines()] == ["8", "error:", "10"]
    assert said["error"]


def test_calls_of_a_turn_end_with_the_episode_and_their_rewards_add_up() -> None:
    def turn(path: str, numbers: str) -> dict[str, Any]:
        several = json.dumps([{"name": "tell", "arguments": {"number": one}} for one in numbers.split()])
        return without_waiting.reply(ROW, path + numbers, "s", [several], path, LONGEST)

    ended = turn("made_environments:Ending", "1 1 22 333")
    assert (len(ended["text"].splitlines()), ended["done"], ended["reward"]) == (3, True, 1.0)
    paid = turn("made_environments:Paid", "3 x 4")
    assert (paid["reward"], paid["error"], paid["done"]) == (7.0, True, False)


LIST = '[{"name": "a"}, {"name": "b"}]'
IN_TEXT = '{"name": "tell", "arguments": {"number": "<｜tool▁call▁end｜> "}}'


@pytest.mark.parametrize("content", ["37*48", "", "[1, 2]", '[{"number": 4}]', "[]", '{"name": "tell"}', LIST, IN_TEXT])
def test_what_is_one_call_stays_one(content: str) -> None:
    assert calls_in(content) == [content]
    assert last_calls(f"1 <c> 2 <c>{content}", "<c>") == content
    assert last_calls(content, "") == content


def test_schemas_are_what_chat_templates_read() -> None:
    (schema,) = schemas(load(COUNTER))
    number = {"type": "string", "description": "Digits."}
    parameters = {"type": "object", "properties": {"number": number}, "required": ["number"]}
    function = {"name": "tell", "description": "Notes a number.", "parameters": parameters}
    assert schema["type"] == "function"
    assert schema["function"] | function == schema["function"]
    with pytest.raises(InputError, match="take because it has no docstring"):
        schemas(load(TYPED))


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
        ("bad_environments:Static", "guess is a static method"),
        ("bad_environments:Shared", "hint is a class method"),
        ("bad_environments:get_reward", "get_reward is reserved"),
        ("made_environments:double,bad_environments:reset", "reset is reserved"),
        ("bad_environments:unknown", "a type of unknown: name 'Missing' is not defined"),
    ],
)
def test_what_cannot_be_an_environment_is_refused(path: str, what: str) -> None:
    with pytest.raises(InputError, match=what) as refused:
        load(path)
    assert refused.value.fix
    assert "environment.path" in refused.value.field


@given(st.lists(st.text(alphabet="0123456789", max_size=3), min_size=1, max_size=6), st.sets(st.integers(0, 5)))
def test_replies_do_not_depend_on_whether_the_object_was_kept(calls: list[str], lost: set[int]) -> None:
    _kept.clear()
    expected = [
        without_waiting.reply(ROW, "kept", "3/p", calls[: number + 1], COUNTER, LONGEST) for number in range(len(calls))
    ]
    for number, reply in enumerate(expected):
        if number in lost:
            _kept.clear()
        assert without_waiting.reply(ROW, "again", "3/p", calls[: number + 1], COUNTER, LONGEST) == reply
    assert expected[0]["text"].startswith("1")
    assert expected[-1]["text"].startswith(str(len(calls)))


def test_the_example_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = re.findall(
        r"```python\n(# bisect_game.py\n.*?)```", (REPOSITORY / "docs/environments.md").read_text(), re.S
    )
    (tmp_path / "bisect_game.py").write_text(program)
    monkeypatch.syspath_prepend(str(tmp_path))
    calls = [json.dumps({"name": "guess", "arguments": {"number": number}}) for number in (16, 24, 20)]
    replies = [
        without_waiting.reply({"answer": "20"}, "k", "s", calls[: n + 1], "bisect_game:Bisect", LONGEST)
        for n in range(3)
    ]
    assert [reply["text"] for reply in replies] == ["higher", "lower", "right"]
    for done, expected in ((2, 0.0), (3, 1.0)):
        assert without_waiting.reward({"answer": "20"}, "k", "s", calls[:done], "bisect_game:Bisect") == expected


def test_objects_of_old_episodes_are_dropped() -> None:
    for number in range(KEPT + 10):
        without_waiting.reply(ROW, str(number), "s", ["1"], COUNTER, LONGEST)
    assert len(_kept) == KEPT


@pytest.mark.parametrize(("call", "error"), [("fail", SystemExit), ("nan", NoVerdict)])
def test_an_episode_that_fails_is_closed(call: str, error: type[BaseException]) -> None:
    made = load("made_environments:Machine").make
    made.closed.clear()
    assert without_waiting.reply({"name": call}, call, "s", ["1"], "made_environments:Machine", LONGEST)["text"] == "1"
    with pytest.raises(error):
        without_waiting.reply({"name": call}, call, "s", ["1", call], "made_environments:Machine", LONGEST)
    assert made.closed == [call]
    assert call not in _kept


def test_a_parser_of_sglang_needs_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(InputError, match=r"environment\.tool_call_parser=glm45: SGLang cannot be imported"):
        calls_of_sglang("", "", "glm45", [])


@pytest.mark.parametrize("what", ["raise", "none", "bytes", "nan"])
def test_what_a_tool_raises_or_returns_is_text_for_the_model(what: str) -> None:
    reply = without_waiting.reply({}, what, "s", [what], "made_environments:Broken", LONGEST)
    assert isinstance(reply["text"], str)
    assert reply["error"] == (what == "raise")


def test_the_settings_of_a_model_s_calls_follow_from_its_chat_template() -> None:
    """Which the docs list, too."""
    table = (REPOSITORY / "docs" / "environments.md").read_text().replace("\\|", "|")
    for mark, settings in FORMS.items():
        expected = {name: value.replace("{tool}", "f") for name, value in settings.items()}
        assert form_of(f"{{{{- '{mark}' + call.name }}}}", ["f"]) == expected
        if parser := settings.get("tool_call_parser"):
            assert f"| `{parser}` | `{settings['close']}` |" in table
        else:
            assert all(f"`{name}: {value}`" in table for name, value in settings.items())
    assert form_of("{{- '<tool_call>\\n{\"name\": ' }}") == {}


@pytest.mark.parametrize(
    ("path", "argument"),
    [(COUNTER, "number"), (PAIR, None), ("made_environments:star", None), ("made_environments:by_place", None)],
)
def test_one_argument_that_can_be_named_may_stand_alone(path: str, argument: str | None) -> None:
    assert argument_alone(load(path)) == argument
