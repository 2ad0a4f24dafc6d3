"""Agents between samples and endpoint on one rank: whatever one does leaves a score, or a reason, and others go on."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from limits import limit
from processes import left, tree
from test_conversation import HostileTokenizer, say, say_more

from grpo_mega.config.schema import EnvironmentConfig
from grpo_mega.environment.agent_chat import turns_of
from grpo_mega.environment.conversation import Conversation
from grpo_mega.rollout.engine import TURN
from grpo_mega.types import Prompt, Sample, Score

BOTH = ["agents:hostile", "agents:hostile_async"]


def agents_of(path: str = BOTH[0], seconds: float = 60.0, context: int = 200, **more: Any) -> closing[Conversation]:
    settings = {"path": path, "open": "", "close": "=", "seconds": limit(seconds), "at_once": 1}
    return closing(Conversation(EnvironmentConfig(**settings | more), HostileTokenizer(), context, 0, rewarded=True))


@pytest.fixture(scope="module", params=BOTH)
def conversation(request: pytest.FixtureRequest, paths: None) -> Iterator[Conversation]:
    with agents_of(request.param) as made:
        yield made


def begin(conversation: Conversation, *answers: str, turns: int = 3, first: int = 0) -> list[Sample]:
    """The first turns of samples, whose agents will do this; problems and samples are numbered from `first` on."""
    asked = "a" * turns
    prompts = [Prompt(f"p/{i}", (1,), "?", answer, "sums", asked=asked) for i, answer in enumerate(answers, first)]
    opened = conversation.opened(prompts)
    return [replace(say("x", number), prompt=prompt) for number, prompt in enumerate(opened, first)]


def scored(conversation: Conversation, samples: Sequence[Sample]) -> list[float | str | None]:
    """The reward of each sample, or why it has no score."""
    seen: list[float | None] = []

    def score(given: Sequence[Sample]) -> list[Score]:
        seen.extend(one.reward for one in given)
        return [Score(1.0, {}) for _ in given]

    found = conversation.scores(score, samples)
    rewards = iter(seen)
    return [one.unscorable or next(rewards) for one in found]


def replies(sample: Sample) -> list[str]:
    return [HostileTokenizer().decode(sample.token_ids[first:end]) for first, end in sample.given]


def finished(conversation: Conversation, sample: Sample, longest: int = 200) -> Sample:
    """The sample after as many turns as its agent wants."""
    (sample,) = conversation.go_on([sample], longest)
    while sample.finish_reason == TURN:
        (sample,) = conversation.go_on([say_more(sample, "y")], longest)
    return sample


def test_an_agent_plays_its_turns_and_gives_the_reward(conversation: Conversation) -> None:
    (sample,) = begin(conversation, "count")
    assert (sample.prompt.text, sample.prompt.unopened) == ("<bos>aaa", "")
    sample = finished(conversation, sample)
    assert (sample.finish_reason, replies(sample), sample.restarts) == ("stop", ["1", "2"], ())
    assert [call.text for call in sample.calls] == ["x", "y", "y"]
    for one, before in ((sample, [4, 7, 10]), (replace(sample, restarts=(2,)), [4, 1, 4])):
        turns = turns_of(one, HostileTokenizer())
        assert [turn["prompt_tokens"] for turn in turns] == before
    assert scored(conversation, [sample]) == [3.0]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("nothing", "the agent returned without a request to base_url"),
        ("early", "ValueError: no board"),
        ("much", "the agent's request has 10,0"),
    ],
)
def test_an_agent_that_cannot_begin_leaves_no_score(conversation: Conversation, answer: str, why: str) -> None:
    sample, other = begin(conversation, answer, "count")
    assert why in sample.prompt.unopened
    (asked,) = conversation.go_on([sample], 200)
    assert asked.finish_reason == "stop"
    reason, reward = scored(conversation, [asked, finished(conversation, other)])
    assert reason == f"environment: first request: {sample.prompt.unopened}"
    assert reward == 3.0


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("raise", "ValueError: no luck"),
        ("nan", "a reward must be a finite number"),
        ("text", "a reward must be a finite number"),
        ("none", None),
        ("exit", "exit code 3"),
        ("leave", "SystemExit: 4"),
        ("fork", 2.0),
        ("beside", 2.0),
        ("clock", "the agent's first request differs from that of its problem"),
    ],
)
def test_whatever_an_agent_does_leaves_a_score_or_a_reason(
    conversation: Conversation, answer: str, expected: float | str | None
) -> None:
    """And another sample of its process goes on, or is played again."""
    sample, other = begin(conversation, answer, "count")
    (other,) = conversation.go_on([replace(other, number=1)], 200)
    result, reward = scored(
        conversation, [finished(conversation, sample), finished(conversation, say_more(other, "y"))]
    )
    assert reward == 3.0
    if isinstance(expected, str):
        assert isinstance(result, str)
        assert result.startswith("environment: ")
        assert expected in result
    else:
        assert result == expected


@pytest.mark.parametrize("path", BOTH)
def test_an_agent_that_hangs_is_given_up(path: str) -> None:
    with agents_of(path, seconds=1.0) as conversation:
        sample, other = begin(conversation, "hang", "count")
        (other,) = conversation.go_on([other], 200)
        (sample,) = conversation.go_on([sample], 200)
        assert sample.finish_reason == "abort"
        result, reward = scored(conversation, [sample, finished(conversation, say_more(other, "y"))])
    assert "no answer within" in str(result)
    assert reward == 3.0


@pytest.mark.parametrize("answer", ["big", "special"])
def test_what_an_agent_sends_is_text_that_may_have_no_room(conversation: Conversation, answer: str) -> None:
    (sample,) = begin(conversation, answer)
    (sample,) = conversation.go_on([sample], 200)
    if answer == "big":
        assert (sample.finish_reason, sample.given) == ("length", ())
        assert scored(conversation, [sample]) == [0.0]
    else:
        assert replies(sample) == ["eos7answer=bos"]
        conversation.scores(lambda given: [Score(1.0, {}) for _ in given], [sample])


@pytest.mark.parametrize(("answer", "reward"), [("count", 0.0), ("kept", 2.5)])
@pytest.mark.parametrize("limited", ["calls", "tokens", "context", "cut"])
def test_beyond_a_limit_an_agent_is_refused(limited: str, answer: str, reward: float) -> None:
    """What it then returns counts; if it gives up, it has earned nothing."""
    most = {"max_calls": 1} if limited == "calls" else {}
    with agents_of(context=9 if limited == "context" else 200, **most) as conversation:
        (sample,) = begin(conversation, answer, turns=3)
        (sample,) = conversation.go_on([sample], 200)
        assert sample.finish_reason == TURN
        sample = say_more(sample, "y")
        if limited == "cut":
            sample = replace(sample, token_ids=sample.token_ids[:-1], logprobs=sample.logprobs[:-1])
            sample = replace(sample, finish_reason="length")
        (sample,) = conversation.go_on([sample], 4 if limited == "tokens" else 200)
        assert (sample.finish_reason, len(sample.given)) == ("length", 1)
        assert turns_of(sample, HostileTokenizer())[-1]["cut"] is (limited == "cut")
        assert scored(conversation, [sample]) == [reward]


def test_fields_that_change_nothing_are_announced_once(caplog: pytest.LogCaptureFixture) -> None:
    """Those of the first request, too, which may be the only one."""
    with agents_of("agents:warm") as conversation, caplog.at_level(logging.WARNING):
        for sample in begin(conversation, "a", "b"):
            finished(conversation, sample)
    said = [one for one in caplog.messages if "changes nothing" in one]
    assert [one.partition("have ")[2].partition("=")[0] for one in said] == ["temperature", "top_p", "max_tokens"]


def test_no_proxy_stands_between_an_agent_and_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with agents_of("agents:through_proxies") as conversation:
        (sample,) = begin(conversation, "a")
        assert scored(conversation, [finished(conversation, sample)]) == [1.0]


def test_agents_that_go_on_for_a_while_after_their_first_request_harm_no_other() -> None:
    """As those that try again what was refused: twenty openings leave twenty of them."""
    with agents_of() as conversation:
        assert [sample.prompt.unopened for sample in begin(conversation, *["stubborn"] * 20)] == [""] * 20


def test_agents_that_never_end_end_their_process_and_others_go_on() -> None:
    """After nine of them; then another process plays the turns again."""
    with agents_of(seconds=1.0) as conversation:
        samples = conversation.go_on(begin(conversation, *["stuck"] * 10), 1)
        assert {sample.finish_reason for sample in samples} == {"length"}
        pid = process_of(conversation)
        for some in (samples[:9], samples[9:]):
            assert all("within" in str(one) or "exit code 1" in str(one) for one in scored(conversation, some))
        assert process_of(conversation) != pid


def process_of(conversation: Conversation) -> str:
    """The number of the process that has the agents, as one of them says."""
    # Of another problem: the end of an earlier agent of the same would be waited for.
    (sample,) = conversation.go_on(begin(conversation, "who", first=100), 200)
    scored(conversation, [replace(sample, finish_reason="length")])
    return replies(sample)[0]


def test_a_lost_run_that_may_not_be_repeated_leaves_no_score() -> None:
    with agents_of(replayable=False) as conversation:
        (sample,) = begin(conversation, "count")
        (sample,) = conversation.go_on([sample], 200)
    with agents_of(replayable=False) as again:
        (sample,) = again.go_on([say_more(sample, "y")], 200)
        assert sample.finish_reason == "abort"
        (reason,) = scored(again, [sample])
    assert "the agent's run is lost, and environment.replayable=false" in str(reason)


@pytest.mark.parametrize("path", BOTH)
def test_after_a_resume_the_turns_are_played_again(path: str) -> None:
    with agents_of(path) as conversation:
        (sample,) = begin(conversation, "count", turns=5)
        for _ in range(2):
            (sample,) = conversation.go_on([sample], 200)
            sample = say_more(sample, "y")
        once = finished(conversation, sample)
        rewards = scored(conversation, [once])
    with agents_of(path) as again:
        resumed = finished(again, sample)
        assert resumed == once
        assert scored(again, [resumed]) == rewards == [5.0]
    with agents_of(path) as at_the_end:
        assert scored(at_the_end, [once]) == rewards


def test_the_journal_has_what_an_agent_requested_even_if_it_would_now_say_something_else(tmp_path: Path) -> None:
    with agents_of() as conversation:
        conversation.record(tmp_path, 0, step=3, saved=0)
        (sample,) = begin(conversation, "asks the time", turns=5)
        (first,) = conversation.go_on([sample], 200)
        (second,) = conversation.go_on([say_more(first, "y")], 200)
    with agents_of() as again:
        again.record(tmp_path, 0, step=3, saved=0)
        (sample,) = begin(again, "asks the time", turns=5)
        assert again.go_on([sample], 200) == [first]
        assert again.go_on([say_more(first, "y")], 200) == [second]
        (other,) = again.go_on([say_more(first, "z")], 200)
        assert replies(other)[1] != replies(second)[1], "another turn is no recorded one"


def test_an_agent_that_takes_another_course_goes_on_and_this_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Once, and not of one that requests the same again."""
    with agents_of() as conversation:
        (clock, same) = conversation.go_on(begin(conversation, "asks the time", "count", turns=5), 200)
    with agents_of() as again:
        after = again.go_on([say_more(clock, "y"), say_more(same, "y")], 200)
        assert [(one.finish_reason, len(one.given), one.restarts) for one in after] == [(TURN, 2, ())] * 2
        after = again.go_on([say_more(one, "z") for one in after], 200)
    told = [record.getMessage() for record in caplog.records if "requested something else" in record.getMessage()]
    assert len(told) == 1
    assert "of problem p/0, sample 0" in told[0]


def test_a_run_that_got_other_turns_is_not_gone_on_with() -> None:
    """As after an engine was lost, and another turn sampled."""
    with agents_of() as conversation, agents_of() as beside:
        (first,) = conversation.go_on(begin(conversation, "echo", turns=5), 200)
        conversation.go_on([say_more(first, "y")], 200)
        begin(beside, "echo", turns=5)
        (other,) = beside.go_on([say_more(first, "z")], 200)
        (third,) = conversation.go_on([say_more(other, "w")], 200)
    assert replies(third) == ["x", "xz", "xzw"]


def test_after_the_end_no_process_of_agents_is_left() -> None:
    before = {process.pid for process in tree(os.getpid())}
    with agents_of(at_once=2) as conversation:
        samples = conversation.go_on(begin(conversation, "count", "count"), 200)
        assert {sample.finish_reason for sample in samples} == {TURN}
        processes = [process for process in tree(os.getpid()) if process.pid not in before]
        assert len(processes) >= 4, "each has a guard"
    assert left(processes) == []
