"""Runs in which an environment answers the policy: ids are only appended, nothing given is learned, a stop changes
nothing, and what goes wrong is either the model's to read or leaves a sample without a score."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ranks import results, run_ranks

from grpo_mega.config.load import compose_config
from grpo_mega.config.schema import EnvironmentConfig
from grpo_mega.data.tokenizer import CharTokenizer
from grpo_mega.environment.conversation import Conversation
from grpo_mega.errors import ConfigError
from grpo_mega.rollout.engine import TURN
from grpo_mega.types import Prompt, Sample, Score

HERE = Path(__file__).parent
JOB = HERE / "conversation_job.py"
LAYOUTS = [
    pytest.param((1, ["layout=single"]), id="alone"),
    pytest.param((2, ["layout=ep2"]), id="ep2", marks=pytest.mark.long),
    pytest.param((2, ["layout=tp2"]), id="tp2", marks=pytest.mark.long),
]


@pytest.fixture(scope="module", autouse=True)
def paths() -> Iterator[None]:
    """The jobs find the environments of this folder, and what jobs of stages share."""
    with pytest.MonkeyPatch.context() as patch:
        for folder in (HERE, HERE.parent / "stages"):
            patch.syspath_prepend(str(folder))
            patch.setenv("PYTHONPATH", str(folder), prepend=":")
        yield


@pytest.fixture(scope="module", params=LAYOUTS)
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    ranks, layout = request.param
    return results(run_ranks(JOB, ranks, [str(tmp_path_factory.mktemp("environment")), *layout], timeout=600))


@pytest.mark.parametrize("name", ["whole", "sliced"])
def test_each_call_is_followed_by_its_reply(found: dict[str, Any], name: str) -> None:
    tokenizer, ended = CharTokenizer(), {"calls": 0, "length": 0}
    for sample in found[name]["samples"]:
        assert len(sample["given"]) == len(sample["calls"]) <= 3
        assert sample["given_logprobs"] == 0
        before = 0
        for number, ((first, end), (call, error)) in enumerate(zip(sample["given"], sample["calls"], strict=True)):
            turn, reply = (tokenizer.decode(sample["ids"][a:b]) for a, b in ((before, first), (first, end)))
            assert turn.endswith("=")
            assert turn[:-1].rpartition("+")[2] == call
            assert reply.startswith(str(number + 1))
            assert reply.endswith("<think>")
            assert not error
            before = end
        assert sum(end - first for first, end in sample["given"]) + 24 >= len(sample["ids"])
        ended["calls"] += len(sample["calls"])
    assert ended["calls"] > 10
    assert max(found[name]["mismatch"]) < 1e-5
    assert sum(found[name]["calls"]) * 16 == pytest.approx(ended["calls"])


def test_the_secret_of_a_problem_is_the_same_for_its_group(found: dict[str, Any]) -> None:
    secrets: dict[str, set[str]] = {}
    for sample in found["whole"]["samples"]:
        secrets.setdefault(sample["prompt"], set()).update(
            CharTokenizer().decode(sample["ids"][first:end])[1] for first, end in sample["given"]
        )
    assert all(len(of_group) <= 1 for of_group in secrets.values())
    assert len(set().union(*secrets.values())) > 1


def test_slices_change_no_call_and_no_reply(found: dict[str, Any]) -> None:
    whole, sliced = (
        {(s["prompt"], s["index"]): (s["ids"], s["given"], s["calls"]) for s in found[name]["samples"]}
        for name in ("whole", "sliced")
    )
    common = whole.keys() & sliced.keys()
    assert len(common) >= 32
    assert all(whole[one] == sliced[one] for one in common)


@pytest.mark.parametrize("name", ["peace", "slices", "ahead"])
def test_a_stop_changes_nothing(found: dict[str, Any], name: str) -> None:
    assert found["stopped"][name] == {"metrics": True, "digest": True}


@pytest.fixture
def conversation(request: pytest.FixtureRequest, paths: None) -> Iterator[Conversation]:
    settings = {"path": "made_environments:Broken", "open": "", "close": "=", "seconds": 2.0, "at_once": 2}
    made = Conversation(EnvironmentConfig(**{**settings, **request.param}), HostileTokenizer(), 200, 0)
    yield made
    made.close()


class HostileTokenizer(CharTokenizer):
    """Letters too, so that the model can say what shall go wrong."""

    def __init__(self) -> None:
        super().__init__([*"abcdefghijklmnopqrstuvwxyz"])


def say(what: str, number: int = 0) -> Sample:
    ids = array("i", HostileTokenizer().encode(f"{what}="))
    prompt = Prompt(f"p/{number}", (1,), "?", "5", "sums")
    return Sample(prompt, 0, ids, array("f", [-1.0] * len(ids)), "stop", ((0, 0),), what, number=number)


@pytest.mark.parametrize("conversation", [{"max_reply_tokens": 20}], indirect=True)
@pytest.mark.parametrize(
    ("what", "reply"),
    [
        ("raise", "error: alueError: no"),
        ("none", "one"),
        ("nan", "nan"),
        ("bytes", "bxff"),
        ("long", "7777777777 ... 7777777777"),
        ("lone", ""),
    ],
)
def test_whatever_a_tool_returns_is_a_reply(conversation: Conversation, what: str, reply: str) -> None:
    (sample,) = conversation.go_on([say(what)])
    ((first, end),) = sample.given
    text = HostileTokenizer().decode(sample.token_ids[first:end])
    kept = "".join(one for one in reply if one in HostileTokenizer().tokens)
    assert text == kept
    assert (sample.finish_reason, sample.calls[0].error) == (TURN, what == "raise")
    assert [*sample.logprobs[first:end]] == [0.0] * (end - first)


@pytest.mark.parametrize("conversation", [{}], indirect=True)
@pytest.mark.parametrize(("what", "why"), [("exit", "exit code 3"), ("hang", "within 2 s")])
def test_what_ends_its_process_leaves_one_sample_without_a_score(
    conversation: Conversation, what: str, why: str
) -> None:
    samples = conversation.go_on([say("none", 0), say(what, 1), say("nan", 2)])
    assert [sample.finish_reason for sample in samples] == [TURN, "abort", TURN]
    (score,) = conversation.scores(lambda given: [Score(1.0, {}) for _ in given], samples[1:2])
    assert score.unscorable.startswith("environment: ")
    assert why in score.unscorable
    assert conversation.go_on([say("none", 1)])[0].finish_reason == TURN, "it has a new process"
    assert conversation.scores(lambda given: [Score(1.0, {}) for _ in given], [say("x", 1)])[0].total == 1


@pytest.mark.parametrize("conversation", [{"max_calls": 2}], indirect=True)
def test_calls_beyond_the_limits_end_a_sample_like_its_length(conversation: Conversation) -> None:
    sample = say("none")
    for _ in range(2):
        (sample,) = conversation.go_on([sample])
        assert sample.finish_reason == TURN
        more = array("i", HostileTokenizer().encode("nan="))
        logprobs = sample.logprobs + array("f", [-1.0] * len(more))
        sample = replace(sample, token_ids=sample.token_ids + more, logprobs=logprobs, finish_reason="stop")
    (ended,) = conversation.go_on([sample])
    assert (ended.finish_reason, len(ended.calls), ended.token_ids) == ("length", 2, sample.token_ids)
    (full,) = conversation.go_on([say("x" * 196)])
    assert (full.finish_reason, full.calls) == ("length", ())


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
