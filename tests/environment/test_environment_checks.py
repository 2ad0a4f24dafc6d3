"""What is checked, and told, of an environment before a run begins."""

from __future__ import annotations

from contextlib import closing

import pytest

from grpo_mega.config.load import compose_config
from grpo_mega.config.schema import EnvironmentConfig
from grpo_mega.data.tokenizer import CharTokenizer
from grpo_mega.environment.calls import JSON_CALL
from grpo_mega.environment.conversation import Conversation
from grpo_mega.errors import ConfigError, InputError
from grpo_mega.types import Prompt


def begun(name: str, **settings: str) -> Conversation:
    """A conversation of the toy with one of the tests' environments."""
    config = EnvironmentConfig(path=f"made_environments:{name}", close="=", at_once=1, **settings)
    return Conversation(config, CharTokenizer(), 100, 0, rewarded=name == "Judge")


@pytest.mark.parametrize(
    ("settings", "rewarded", "what"),
    [
        ({"path": "nothing_here:A"}, False, "No module named 'nothing_here'.*start in the folder where it is"),
        ({"path": "bad_environments:Idle"}, False, "has no tools"),
        ({"path": "bad_environments:Exits"}, False, "exit code 7"),
        ({"path": "bad_environments:Unmade"}, False, "no licence"),
        ({"path": "python_boxes:Nowhere"}, False, "apt-get install bubblewrap"),
        ({"path": "made_environments:Broken"}, True, "has no method get_reward"),
        ({"path": "bad_environments:generating"}, False, "an agent that is a generator; return the reward"),
        ({"path": "bad_environments:generating_at_once"}, False, "an agent that is a generator; return the reward"),
        ({"path": "bad_environments:unnamed"}, False, "base_url of the agent cannot be named; leave out the /"),
        ({"path": "agents:hostile,agents:count"}, False, "an agent beside others; name one agent"),
        ({"path": "made_environments:Broken", "close": "]]"}, False, "not a token"),
        ({"path": "made_environments:Broken", "reply": "{reply}~"}, False, "not in the vocabulary"),
    ],
)
def test_an_environment_that_cannot_be_used_is_refused_at_the_start(
    settings: dict[str, str], rewarded: bool, what: str
) -> None:
    config = EnvironmentConfig(**{"close": "=", "at_once": 1, **settings})
    with pytest.raises(InputError, match=f"(?s){what}") as refused:
        Conversation(config, CharTokenizer(), 100, 0, rewarded)
    assert refused.value.field.startswith("environment.")
    assert str(refused.value).count("environment.path") <= 1
    assert "/grpo_mega/environment/" not in str(refused.value), "a user's error has only the user's stack"


def test_a_path_and_a_token_that_cannot_be_used_are_named_together() -> None:
    config = EnvironmentConfig(path="bad_environments:Idle", close="]]", at_once=1)
    with pytest.raises(ConfigError) as refused:
        Conversation(config, CharTokenizer(), 100, 0)
    assert [problem.field for problem in refused.value.problems] == ["environment.close", "environment.path"]


def test_a_class_with_a_base_url_is_no_agent() -> None:
    config = EnvironmentConfig(path="bad_environments:Search", close="=", at_once=1)
    with closing(Conversation(config, CharTokenizer(), 100, 0)) as conversation:
        assert not conversation.is_agent


@pytest.mark.parametrize(("name", "warned"), [("Counter", True), ("Judge", False)])
def test_a_reward_for_which_no_term_asks_is_told(name: str, warned: bool) -> None:
    with closing(begun(name)) as conversation:
        assert any("get_reward" in warning for warning in conversation.warnings) == warned


@pytest.mark.parametrize(
    ("begin", "told"),
    [
        ("(", "number alone, or {JSON}, after the last ( and up to ="),
        ("", "number alone, or {JSON}, from the beginning of a turn and up to ="),
    ],
)
def test_it_says_how_its_tools_are_called(begin: str, told: str) -> None:
    with closing(begun("Counter", open=begin)) as conversation:
        assert conversation.tools() == "tools: tell; a call is " + told.replace("{JSON}", JSON_CALL)
        assert not any("no call can be right" in warning for warning in conversation.warnings)


def test_calls_that_cannot_be_written_are_told() -> None:
    """The toy's tokenizer has no braces, and two tools have no bare calls."""
    with closing(begun("Done")) as conversation:
        assert any("no call can be right: it is {" in warning for warning in conversation.warnings)


@pytest.mark.parametrize(
    ("name", "second", "what"),
    [
        ("Needs", {"level": "2"}, ""),
        ("Needs", {"Level": "2"}, "reset needs 'level', which the problem p/1 of t does not have"),
        ("Takes", {}, "reset does not take 'level', a field of the problem p/0 of t"),
        ("Begins", {}, ""),
        ("TextGym", {"level": "2"}, ""),
        ("double", {"level": "2"}, ""),
    ],
)
def test_problems_without_the_fields_of_reset_are_refused(name: str, second: dict[str, str], what: str) -> None:
    prompts = [Prompt("p/0", (1,), "", "5", "t", {"level": "1"}), Prompt("p/1", (1,), "", "5", "t", second)]
    with closing(begun(name)) as conversation:
        if not what:
            conversation.check_fields(prompts)
            return
        with pytest.raises(InputError, match=what) as refused:
            conversation.check_fields(prompts)
    assert refused.value.where == f"environment.path=made_environments:{name}"


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("environment.reply", ["environment.reply=nothing"]),
        ("environment.max_calls", ["environment.max_calls=0"]),
        ("environment.seconds", ["environment.seconds=0"]),
        ("reward.terms: environment", ["environment.path=null"]),
        ("environment.open", ["environment.path=null", "environment.open=x"]),
    ],
)
def test_settings_that_cannot_work_are_refused(field: str, more: list[str]) -> None:
    given = [
        "experiment=tiny",
        "environment.path=a:B",
        "reward.terms=[{name:environment}]",
        "reward.success=environment",
    ]
    with pytest.raises(ConfigError) as refused:
        compose_config([*given, *more])
    assert field in [problem.field for problem in refused.value.problems]
