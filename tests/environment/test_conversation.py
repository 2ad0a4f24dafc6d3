"""Turns between samples and an environment on one rank: what goes wrong is either the model's to read, or leaves a
sample without a score."""

from __future__ import annotations

import json
import logging
import os
import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from limits import limit
from made_tokenizer import write_tokenizer
from ranks import run_ranks

from grpo_mega.config.schema import EnvironmentConfig
from grpo_mega.data.huggingface import HuggingFaceTokenizer
from grpo_mega.data.tokenizer import CharTokenizer
from grpo_mega.environment.conversation import Conversation
from grpo_mega.platform.clock import own_clock
from grpo_mega.platform.trace import Process, Trace, phase, recording, step
from grpo_mega.rollout.engine import TURN
from grpo_mega.show.traces.trace_files import events_in
from grpo_mega.types import Call, Prompt, Sample, Score

HERE = Path(__file__).parent


@pytest.fixture
def conversation(request: pytest.FixtureRequest, paths: None) -> Iterator[Conversation]:
    settings = {"path": "made_environments:Broken", "open": "", "close": "=", "seconds": 2.0, "at_once": 2}
    config = EnvironmentConfig(**{**settings, **request.param})
    made = Conversation(config, HostileTokenizer(), 200, 0, rewarded=config.path.endswith("Judge"))
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


def say_more(sample: Sample, what: str) -> Sample:
    """The sample after another turn."""
    more = array("i", HostileTokenizer().encode(f"{what}="))
    logprobs = sample.logprobs + array("f", [-1.0] * len(more))
    return replace(sample, token_ids=sample.token_ids + more, logprobs=logprobs, finish_reason="stop")


@pytest.mark.parametrize(
    ("conversation", "question", "warned"),
    [
        ({"path": "made_environments:Counter"}, "tell", False),
        ({"path": "made_environments:Counter"}, "teller", True),
        # What is called has no name.
        ({"path": "made_environments:TextEnv"}, "guess", False),
    ],
    indirect=["conversation"],
)
def test_a_prompt_that_names_no_tool_is_told(conversation: Conversation, question: str, warned: bool) -> None:
    prompt = Prompt("p/0", tuple(HostileTokenizer().encode(question)), question, "5", "sums")
    assert bool(conversation.untold(prompt)) is warned


@pytest.mark.parametrize("conversation", [{"max_reply_tokens": 20}], indirect=True)
@pytest.mark.parametrize(
    ("what", "reply"),
    [
        ("raise", "error: alueError: no"),
        ("none", "one"),
        ("nan", "nan"),
        ("bytes", "bxff"),
        ("long", "7777777777 ... 7777777777"),
        ("lone", "?"),
    ],
)
def test_whatever_a_tool_returns_is_a_reply(conversation: Conversation, what: str, reply: str) -> None:
    (sample,) = conversation.go_on([say(what)], 200)
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
    samples = conversation.go_on([say("none", 0), say(what, 1), say("nan", 2)], 200)
    assert [sample.finish_reason for sample in samples] == [TURN, "abort", TURN]
    (score,) = conversation.scores(lambda given: [Score(1.0, {}) for _ in given], samples[1:2])
    assert score.unscorable.startswith("environment: ")
    assert why in score.unscorable
    assert conversation.go_on([say("none", 1)], 200)[0].finish_reason == TURN, "it has a new process"
    assert conversation.scores(lambda given: [Score(1.0, {}) for _ in given], [say("x", 1)])[0].total == 1


@pytest.mark.parametrize("conversation", [{"cpu_seconds": None}, {"replayable": False}], indirect=True)
def test_without_a_limit_no_call_is_undone(conversation: Conversation) -> None:
    (sample,) = conversation.go_on([say("profile")], 200)
    (score,) = conversation.scores(lambda given: [Score(1.0, {}) for _ in given], [sample])
    assert "was killed by SIGPROF" in score.unscorable


@pytest.mark.parametrize("conversation", [{"seconds": 60.0, "at_once": 1}], indirect=True)
@pytest.mark.parametrize("what", ["fork", "print"])
def test_forks_and_output_change_no_reply(conversation: Conversation, what: str) -> None:
    """A fork returns too, and 100 MB fill every pipe."""
    first, second = conversation.go_on([say(what, 0), say("nan", 1)], 200)
    (third,) = conversation.go_on([say_more(first, "one")], 200)
    replies = [HostileTokenizer().decode(one.token_ids[slice(*one.given[-1])]) for one in (first, second, third)]
    assert replies == [what, "nan", "one"]


@pytest.mark.parametrize("conversation", [{"path": "made_environments:Unclosed", "at_once": 1}], indirect=True)
def test_what_cannot_be_closed_ends_all_the_same(conversation: Conversation) -> None:
    prompts = conversation.opened([Prompt("p/0", (1, 4), "<bos>1", "ab", "t", asked="1")])
    assert (prompts[0].opening, prompts[0].unopened) == ("ab", "")
    samples = conversation.go_on([replace(say("x", n), prompt=prompts[0], index=n) for n in range(3)], 200)
    # Another history: the object is closed, and made anew.
    samples[0] = replace(samples[0], calls=(Call("y", False),))
    samples = conversation.go_on([say_more(sample, "z") for sample in samples], 200)
    assert [sample.finish_reason for sample in samples] == [TURN] * 3


@pytest.mark.parametrize("conversation", [{"path": "made_environments:Mutates", "at_once": 1}], indirect=True)
def test_each_episode_gets_the_problem_as_it_is(conversation: Conversation) -> None:
    problem = Prompt("p/0", (1, 4), "<bos>1", "5", "t", {"board": ["a"]}, asked="1")
    for _ in range(2):
        (prompt,) = conversation.opened([problem])
        assert prompt.opening == "areset"
    samples = [replace(say("x", number), prompt=prompt, index=number) for number in range(3)]
    for turns in ("x", "xx"):
        samples = conversation.go_on(samples, 200)
        replies = {HostileTokenizer().decode(one.token_ids[slice(*one.given[-1])]) for one in samples}
        assert replies == {f"areset{turns}"}
        samples = [say_more(sample, "x") for sample in samples]
    assert problem.metadata == {"board": ["a"]}


@pytest.mark.long
def test_ranks_whose_environments_differ_agree(paths: None) -> None:
    """Each sample is asked on one rank alone, whichever holds it, and each opening too."""
    first, second = (json.loads(output.splitlines()[-1]) for output in run_ranks(HERE / "differing_job.py", 2, []))
    assert first["openings"] == second["openings"]
    assert {*first["openings"]} == {"0", "1"}
    assert sorted([*first["replies"], *second["replies"]]) == sorted(str(number) for number in range(16))
    for rank, seen in enumerate((first, second)):
        assert len(seen["replies"]) > 2
        assert {*seen["replies"].values()} == {f"{rank}{rank}"}, "both turns"


@pytest.mark.parametrize(
    "conversation",
    [{"path": "made_environments:Busy", "cpu_seconds": 0.5, "seconds": 120.0, "at_once": 1}],
    indirect=True,
)
@pytest.mark.parametrize("how", ["loop", "power"])
def test_a_call_that_takes_too_much_cpu_time_is_undone(conversation: Conversation, tmp_path: Path, how: str) -> None:
    """Also if it never returns to Python; the policy reads an error, and other episodes of the process go on."""
    conversation.record(tmp_path, 0, step=3, saved=0)
    (other,) = conversation.go_on([say("a", 1)], 200)
    (first,) = conversation.go_on([say("b")], 200)
    (second,) = conversation.go_on([say_more(first, how)], 200)
    assert (second.finish_reason, second.calls[1]) == (TURN, Call(how, True, None, undone=True))
    conversation.record(tmp_path, 0, step=3, saved=0)
    assert conversation.go_on([say_more(first, how)], 200) == [second], "it is recorded"
    after = conversation.go_on([say_more(second, "c"), say_more(other, "d")], 200)
    replies = [HostileTokenizer().decode([*one.token_ids[slice(*one.given[-1])]]) for one in after]
    assert replies == ["bc", "ad"], "the object does not know of the call"


@pytest.mark.parametrize("conversation", [{"seconds": 120.0}], indirect=True)
def test_samples_with_replies_do_not_wait_for_others(pipe: int, conversation: Conversation) -> None:
    """Nor does the failure of a call whose sample was dropped count for the next sample of that number."""
    ended, slow = replace(say("x", 2), finish_reason="length"), say("wait", 1)
    first = conversation.go_on([say("none", 0), slow, ended], 200, wait=0.0)
    assert ended in first
    while len(first) < 2:
        first += conversation.go_on([], 200, wait=60.0)
    assert [sample.number for sample in first if sample.finish_reason == TURN] == [0]
    os.write(pipe, b"x")
    (last,) = conversation.go_on([], 200)
    assert (last.number, last.finish_reason) == (1, TURN)
    conversation.go_on([say("exit", 1)], 200, wait=0.0)
    conversation.forget()
    assert conversation.go_on([], 200) == []
    conversation.go_on([say("none", 1)], 200)  # by the same process
    (score,) = conversation.scores(lambda given: [Score(1.0, {}) for _ in given], [say("x", 1)])
    assert not score.unscorable


@pytest.mark.parametrize("conversation", [{"path": "made_environments:Judge"}], indirect=True)
def test_a_trace_has_the_waits_for_replies_and_rewards(conversation: Conversation, tmp_path: Path) -> None:
    trace = Trace(tmp_path, Process(0, "rank 0", 1), own_clock(), 5, dict)
    with recording(trace), step(1, "grpo"), phase("reward"):
        samples = conversation.go_on([say("none", 0), say("nan", 1), replace(say("x", 2), finish_reason="length")], 200)
        conversation.scores(lambda given: [Score(1.0, {}) for _ in given], samples)
    found = [event for event in events_in((tmp_path / "trace" / "rank-00000.json").read_text()) if event["ph"] == "X"]
    waits = [event for event in found if event["tid"] == 0]
    assert [(event["name"], event["args"]) for event in waits] == [
        ("environment", {"replies": 2}), ("environment", {"rewards": 3}),
    ]  # fmt: skip
    calls = [event for event in found if event["tid"] != 0]
    assert sorted(event["name"] for event in calls) == ["reply", "reply", "reward", "reward", "reward"]
    first, second = ((event["ts"], event["ts"] + event["dur"]) for event in waits)
    for call in calls:
        begin, end = first if call["name"] == "reply" else second
        assert call["ts"] + call["dur"] <= end
        assert call["ts"] + call["dur"] >= begin


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Open at both ends, so that nobody waits for the other one."""
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setenv("WAITS_FOR", str(tmp_path / "pipe"))
    end = os.open(tmp_path / "pipe", os.O_RDWR)
    yield end
    os.close(end)


class Listener(logging.Handler):
    """Lets the environment go on once its wait for what has this word was announced."""

    def __init__(self, pipe: int, word: str = "reply") -> None:
        super().__init__()
        self.pipe, self.word, self.heard = pipe, word, list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        if self.word in record.getMessage():
            self.heard.append(record.getMessage())
            os.write(self.pipe, b"x")


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    logger = logging.getLogger("grpo_mega.environment")
    logger.addHandler(listener)
    try:
        yield
    finally:
        logger.removeHandler(listener)


@pytest.mark.parametrize("conversation", [{"seconds": 30.0}], indirect=True)
def test_a_wait_names_environment_problem_sample_and_turn(
    pipe: int, conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = Listener(pipe)
    with listening(listener):
        conversation.go_on([say("none", 7)], 200)
        for timer in [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]:
            timer.join()
        assert listener.heard == [], "it has replied"
        monkeypatch.setattr("grpo_mega.environment.conversation.LATE", 0.0)
        (sample,) = conversation.go_on([replace(say("wait", 7), calls=(Call("none", False),))], 200)
    assert sample.finish_reason == TURN
    (said,) = listener.heard
    for words in ("made_environments:Broken", "no reply", "problem p/7", "sample 0", "turn 2"):
        assert words in said


@pytest.mark.parametrize("conversation", [{"seconds": 4.0, "at_once": 1}], indirect=True)
def test_a_wait_is_announced_before_its_call_is_ended_with_how_many_wait_behind(
    pipe: int, conversation: Conversation
) -> None:
    listener = Listener(pipe)
    with listening(listener):
        samples = conversation.go_on([say("none", 0), say("wait", 1), say("none", 2), say("none", 3)], 200)
    assert {sample.finish_reason for sample in samples} == {TURN}
    (said,) = listener.heard
    assert "no reply after 2 s, still waiting; problem p/1, sample 0, turn 1; 2 more wait for its process" in said


def test_a_slow_import_is_announced(pipe: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start, and in a new process after a lost one."""
    monkeypatch.setattr("grpo_mega.environment.workers.LATE", 0.0)
    listener = Listener(pipe, "not imported")
    settings = EnvironmentConfig(path="imported_slowly:Slow", open="", close="=", at_once=1)
    with listening(listener), closing(Conversation(settings, HostileTokenizer(), 200, 0)) as conversation:
        assert len(listener.heard) == 1
        lost, answered = conversation.go_on([say("exit", 0), say("none", 1)], 200)
    assert (lost.finish_reason, answered.finish_reason) == ("abort", TURN)
    assert len(listener.heard) == 2
    assert listener.heard[1].startswith("environment.path=imported_slowly:Slow: not imported after 0 s")


def test_calls_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call returns before one is under way in every process: of as many calls none waits for another."""
    folder = tmp_path / "8"
    folder.mkdir()
    monkeypatch.setenv("TOGETHER", str(folder))
    settings = EnvironmentConfig(path="made_environments:Together", open="", close="=", at_once=8, seconds=limit(60.0))
    with closing(Conversation(settings, HostileTokenizer(), 200, 0)) as conversation:
        samples = conversation.go_on([say("x", number) for number in range(16, 24)], 200)
    assert {sample.finish_reason for sample in samples} == {TURN}


@pytest.mark.parametrize("conversation", [{}], indirect=True)
def test_a_hang_costs_others_their_objects_and_not_their_calls(conversation: Conversation) -> None:
    """The calls before are made again, within the time of all of them."""
    (other,) = conversation.go_on([say("none", 1)], 200)
    conversation.go_on([say("hang", number) for number in (2, 3)], 200)  # one of them shares its process
    (after,) = conversation.go_on([say_more(other, "nan")], 200)
    assert (after.finish_reason, len(after.calls)) == (TURN, 2)
    second = replace(say("hang", 6), calls=(Call("none", False),))
    (score,) = conversation.scores(lambda given: [Score(1.0, {}) for _ in given], conversation.go_on([second], 200))
    assert "within 4 s" in score.unscorable, "2 s for each of its calls"


@pytest.mark.parametrize("conversation", [{"path": "made_environments:Judge"}], indirect=True)
@pytest.mark.parametrize(
    ("calls", "reward", "why"),
    [
        (["x", "y"], 2.0, ""),
        (["none"], None, ""),
        (["x", "nan"], None, "a reward must be a finite number"),
        (["fail"], None, "ValueError: no reward"),
        (["loop"], None, "within 2 s"),
    ],
)
def test_the_reward_is_that_of_the_episode(
    conversation: Conversation, calls: list[str], reward: float | None, why: str
) -> None:
    """And whatever becomes of it, the next one of its process has its own."""
    sample, other = (
        replace(say("end", number), calls=tuple(Call(call, False) for call in of_one))
        for number, of_one in ((0, calls), (2, ["x"]))
    )
    seen: list[float | None] = []

    def score(given: Sequence[Sample]) -> list[Score]:
        seen.extend(one.reward for one in given)
        return [Score(1.0, {}) for _ in given]

    found, next_one = conversation.scores(score, [sample, other])
    assert why in found.unscorable
    assert bool(found.unscorable) == bool(why)
    assert seen == [*([] if why else [reward]), 1.0]
    assert not next_one.unscorable


@pytest.mark.parametrize("conversation", [{"path": "made_environments:Begins"}], indirect=True)
@pytest.mark.parametrize(
    ("answer", "opening", "why"),
    [
        ("ab", "ab", ""),
        ("none", "", ""),
        ("lone", "?", ""),
        ("raise", "", "ValueError: no board"),
        ("exit", "", "exit code 3"),
        ("hang", "", "within 2 s"),
        ("bytes", "", "reset returned bytes"),
        ("long", "", "10,000,000 characters"),
        ("full", "", "model.context=200 has no room for a prompt of 302 tokens"),
        ("ABC", "", "not in the vocabulary"),
    ],
)
def test_a_problem_whose_reset_fails_has_no_score(
    conversation: Conversation, caplog: pytest.LogCaptureFixture, answer: str, opening: str, why: str
) -> None:
    prompts = [Prompt(f"p/{i}", (1, 4), "<bos>1", said, "t", asked="1") for i, said in enumerate(("cd", answer, "ef"))]
    before, opened, after = conversation.opened(prompts)
    assert (before.text, after.text) == ("<bos>1cd", "<bos>1ef")
    assert opened.opening == opening
    tokenizer = HostileTokenizer()
    assert opened.token_ids == (tuple(tokenizer.prompt(f"1{opening}")[1]) if opening else prompts[1].token_ids)
    assert why in opened.unopened
    assert why in caplog.text
    assert ("1 of 3 problems" in caplog.text) == ("of p/1: " in caplog.text) == bool(why)
    samples = conversation.go_on([replace(say("x", 1), prompt=opened)], 200)
    assert len(samples[0].calls) == (0 if why else 1)
    (score,) = conversation.scores(lambda given: [Score(1.0, {}) for _ in given], samples)
    assert score.unscorable == (f"environment: reset: {opened.unopened}" if why else "")


CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n\n"
)


def test_what_reset_returns_stands_in_the_last_message(tmp_path: Path) -> None:
    """Before the further words of its task's question, and without a special token."""
    write_tokenizer(tmp_path, with_bos=False)
    (tmp_path / "chat_template.jinja").write_text(CHAT)
    tokenizer = HuggingFaceTokenizer(tmp_path, "chat", question="{prompt} Play!")
    other = tokenizer.asking("chat", "{prompt} Win!", "Black begins.")
    config = EnvironmentConfig(path="made_environments:Begins", close="<|im_end|>", at_once=1)
    system = {"role": "system", "content": "You play."}
    asked: list[Any] = ["Go", [system, {"role": "user", "content": "Go"}]]
    with closing(Conversation(config, tokenizer, 200, 0, asking={"chess": other})) as conversation:
        prompts = [Prompt(f"p/{i}", (1,), "", " to <|im_end|>", "t", asked=one) for i, one in enumerate(asked)]
        text, chat, chess = conversation.opened([*prompts, replace(prompts[0], task="chess")])
    end = tokenizer.token_id("<|im_end|>")
    user = "<|im_start|>user\nGo to <|im_end|> Play!<|im_end|>\n<|im_start|>assistant\n"
    assert (text.text, text.token_ids.count(end)) == (user, 1)
    assert (chat.text, chat.token_ids.count(end)) == (f"<|im_start|>system\nYou play.<|im_end|>\n{user}", 2)
    assert [prompt.asked for prompt in (text, chat)] == asked
    begin = "<|im_start|>system\nBlack begins.<|im_end|>\n<|im_start|>user\nGo to <|im_end|> Win!<|im_end|>\n"
    assert chess.text == f"{begin}<|im_start|>assistant\n"


@pytest.mark.parametrize("drops", [False, True])
def test_a_template_that_drops_thoughts_is_warned_of(tmp_path: Path, drops: bool) -> None:
    write_tokenizer(tmp_path, with_bos=False)
    said = "m.content.split('</think>')[-1]" if drops else "m.content"
    (tmp_path / "chat_template.jinja").write_text(CHAT.replace("m.content", said))
    config = EnvironmentConfig(
        path="made_environments:Paid", close="<|im_end|>", reply="tool", keep_thoughts=True, at_once=1
    )
    with closing(Conversation(config, HuggingFaceTokenizer(tmp_path, "chat"), 200, 0)) as conversation:
        assert len(conversation.warnings) == drops
        assert all("environment.keep_thoughts=true" in one for one in conversation.warnings)


@pytest.mark.parametrize(("most", "reason"), [(3, TURN), (2, "length")])
def test_each_of_several_calls_counts(tmp_path: Path, most: int, reason: str) -> None:
    write_tokenizer(tmp_path, with_bos=False)
    (tmp_path / "chat_template.jinja").write_text(CHAT)
    tokenizer = HuggingFaceTokenizer(tmp_path, "chat", question="{prompt}")
    turn = json.dumps([{"name": "tell", "arguments": {"number": f"{number}"}} for number in range(3)])
    ids = array("i", [*tokenizer.encode(turn), tokenizer.token_id("<|im_end|>")])
    sample = replace(say("none"), token_ids=ids, logprobs=array("f", [-1.0] * len(ids)))
    config = EnvironmentConfig(
        path="made_environments:Paid", open="", close="<|im_end|>", max_calls=most, max_reply_tokens=99, at_once=1
    )
    with closing(Conversation(config, tokenizer, 999, 0)) as conversation:
        (after,) = conversation.go_on([sample], 999)
    assert after.finish_reason == reason
    assert [call.reward for call in after.calls] == [3.0] * (reason == TURN)


@pytest.mark.parametrize("conversation", [{"path": "made_environments:Counter", "replayable": False}], indirect=True)
def test_an_episode_that_cannot_be_rebuilt_leaves_its_sample_without_a_score(
    conversation: Conversation, tmp_path: Path
) -> None:
    conversation.record(tmp_path, 0, step=3, saved=0)
    known, lost = conversation.go_on([say("a")], 200)[0], replace(say("b", 1), calls=(Call("a", False),))
    (after, unanswered) = conversation.go_on([say_more(known, "c"), lost], 200)
    assert (after.finish_reason, len(after.calls)) == (TURN, 2)
    (score,) = conversation.scores(lambda given: [Score(1.0, {}) for _ in given], [unanswered])
    assert "the episode's object is lost, and environment.replayable=false" in score.unscorable
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("conversation", [{"path": "made_environments:Judge", "replayable": False}], indirect=True)
def test_the_reward_of_an_episode_that_cannot_be_rebuilt_needs_its_object(conversation: Conversation) -> None:
    lost = replace(say("end"), calls=(Call("x", False),))
    (score,) = conversation.scores(lambda given: [Score(1.0, {}) for _ in given], [lost])
    assert "the episode's object is lost" in score.unscorable


@pytest.mark.parametrize("conversation", [{"path": "clock_environment:Clock"}], indirect=True)
def test_a_recorded_reply_is_that_of_its_tokens_only(conversation: Conversation, tmp_path: Path) -> None:
    """An engine that is not exact may write another call, or as long a text before it, when it begins again."""

    def replies(*samples: Sample) -> list[list[int]]:
        return [[*sample.token_ids[-6:]] for sample in conversation.go_on(samples, 200)]

    other = replace(say("a"), number=1)
    conversation.record(tmp_path, 0, step=3, saved=0)
    first = replies(say("a"), say("b"), other)
    assert replies(say("a"), say("b"), other) == first
    assert len({tuple(reply) for reply in first}) == 3
    conversation.record(tmp_path, 0, step=4, saved=0)
    assert replies(say("a"), say("b"), other) != first, "another step"


@pytest.mark.parametrize("conversation", [{"max_calls": 2}], indirect=True)
def test_calls_beyond_limits_end_a_sample_like_its_length(conversation: Conversation) -> None:
    sample = say("none")
    for _ in range(2):
        (sample,) = conversation.go_on([sample], 200)
        assert sample.finish_reason == TURN
        sample = say_more(sample, "nan")
    (ended,) = conversation.go_on([sample], 200)
    assert (ended.finish_reason, len(ended.calls), ended.token_ids) == ("length", 2, sample.token_ids)
    (full,) = conversation.go_on([say("x" * 196)], 200)
    assert (full.finish_reason, full.given) == ("length", ())
    assert [call.text for call in full.calls] == ["x" * 196], "its reply does not fit; the call counts"
    (last,) = conversation.go_on([say("none")], 5)
    assert (last.finish_reason, last.calls) == ("length", ()), "it has sampled all that it may"
    (replied,) = conversation.go_on([say("none")], 10)
    (again,) = conversation.go_on([say_more(replied, "nan")], 10)
    assert len(replied.token_ids) + len("nan=") > 10
    assert again.finish_reason == TURN, "it has sampled 9 tokens: the reply does not count"


@pytest.mark.parametrize("conversation", [{"path": "made_environments:Ending"}], indirect=True)
@pytest.mark.parametrize("replayed", [False, True])
def test_the_end_of_an_episode_ends_its_sample(conversation: Conversation, replayed: bool) -> None:
    """Also where the object is missing, as after a resume: another episode's is then made from the calls."""
    (first,) = conversation.go_on([say("a")], 200)
    assert first.finish_reason == TURN
    again = say_more(first, "b")
    if replayed:
        again = replace(again, index=again.index + 1)
    (ended,) = conversation.go_on([again], 200)
    assert ended == replace(again, calls=(Call("a", False, 0.25), Call("b", False, 0.25))), "no reply is appended"
    assert ended.finish_reason == "stop"


@pytest.mark.parametrize("conversation", [{"path": "made_environments:Done"}], indirect=True)
def test_a_tool_with_the_name_done_ends_nothing(conversation: Conversation) -> None:
    assert conversation.go_on([say("a")], 200)[0].finish_reason == TURN


@pytest.mark.parametrize("conversation", [{"path": "made_environments:Fickle", "at_once": 1}], indirect=True)
def test_an_episode_that_cannot_begin_has_no_score(conversation: Conversation) -> None:
    """Its `reset` fails although the one for the prompt's text succeeded."""
    (opened,) = conversation.opened([say("a").prompt])
    assert not opened.unopened
    (sample,) = conversation.go_on([replace(say("a"), prompt=opened)], 200)
    assert (sample.finish_reason, sample.calls) == ("abort", ())
    (score,) = conversation.scores(lambda given: [Score(1.0, {}) for _ in given], [sample])
    assert score.unscorable.startswith("environment: ")
    assert "ValueError: no second board" in score.unscorable


@pytest.mark.parametrize("conversation", [{"path": "made_environments:Judge"}], indirect=True)
def test_what_is_said_is_on_disk_before_it_is_used(
    conversation: Conversation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bytes] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(Path(f"/proc/self/fd/{file}").read_bytes()))
    conversation.record(tmp_path, 0, 0, 0)
    (opened,) = conversation.opened([say("a").prompt])
    samples = conversation.go_on([replace(say("a"), prompt=opened)], 200)
    conversation.scores(lambda given: [Score(1.0, {}) for _ in given], samples)
    recorded = [json.loads(line)[0].split()[0] for line in synced[-1].splitlines() if line]
    assert recorded == ["opening", "reply", "reward"]
    assert [len(lines.splitlines()) for lines in synced] == [2, 3, 4], "once for each; a line begins with its end"
