"""Environments that are declared as `async def`: the calls of a process run at once, and differ in nothing else."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from limits import limit
from ranks import REPOSITORY
from test_conversation import HostileTokenizer, say, say_more

from grpo_mega.config.schema import EnvironmentConfig
from grpo_mega.environment import episode
from grpo_mega.environment.calls import load
from grpo_mega.environment.conversation import Conversation
from grpo_mega.environment.trial import longest_opening
from grpo_mega.rollout.engine import TURN
from grpo_mega.types import Sample, Score


def talk(name: str, at_once: int = 1, rewarded: bool = False, seconds: float = 60.0) -> closing[Conversation]:
    path = f"waiting_environments:{name}"
    config = EnvironmentConfig(path=path, open="", close="=", at_once=at_once, seconds=limit(seconds))
    return closing(Conversation(config, HostileTokenizer(), 400, 0, rewarded))


def replies(sample: Sample) -> list[str]:
    return [HostileTokenizer().decode(sample.token_ids[first:end]) for first, end in sample.given]


def all_at_once(conversation: Conversation, samples: Sequence[Sample]) -> list[Sample]:
    return conversation.go_on(samples, 200)


def as_they_come(conversation: Conversation, samples: Sequence[Sample]) -> list[Sample]:
    """As with SGLang, whose samples end one after the other."""
    ready = [one for sample in samples[:-1] for one in conversation.go_on([sample], 200, wait=0)]
    return sorted([*ready, *conversation.go_on(samples[-1:], 200)], key=lambda sample: sample.number)


def meeting(number: int, most: int) -> Sample:
    sample = say("a", number)
    return replace(sample, prompt=replace(sample.prompt, answer=str(most)))


@pytest.mark.parametrize("go_on", [all_at_once, as_they_come])
def test_no_call_waits_for_another(go_on: Callable[[Conversation, Sequence[Sample]], list[Sample]]) -> None:
    """256 samples of six turns on four processes: a turn takes as long as its slowest call, as none returns before all
    64 of its process are under way."""
    with talk("Meets", at_once=4, rewarded=True) as conversation:
        samples = [meeting(number, 64) for number in range(256)]
        prompts = conversation.opened([sample.prompt for sample in samples])
        samples = [replace(sample, prompt=prompt) for sample, prompt in zip(samples, prompts, strict=True)]
        for turn in range(6):
            samples = go_on(conversation, samples)
            assert {sample.finish_reason for sample in samples} == {TURN}
            if turn < 5:
                samples = [say_more(sample, "abcdef"[turn + 1]) for sample in samples]
        given = []
        conversation.scores(lambda scored: given.extend(scored) or [Score(0.0, {}) for _ in scored], samples)
    for sample in given:
        secret = sample.prompt.opening
        assert [reply[:-1] for reply in replies(sample)] == ["abcdef"[: turn + 1] + secret for turn in range(6)]
        assert sample.reward == 6 + int(secret) / 10
    assert len({sample.prompt.opening for sample in given}) == 10


def test_replies_do_not_depend_on_the_order_of_the_calls() -> None:
    """What an environment draws before it first waits is its sample's."""
    with talk("Meets") as conversation:
        forth = all_at_once(conversation, [meeting(number, 8) for number in range(8)])
    with talk("Meets") as conversation:
        back = as_they_come(conversation, [meeting(number, 8) for number in reversed(range(8))])
    assert [*map(replies, forth)] == [*map(replies, back)]
    assert len({reply for sample in forth for reply in replies(sample)}) > 1


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("exit", "exit code 3"),
        pytest.param("block", "no answer within", marks=pytest.mark.long),
        ("hang", "no answer within"),
        ("fork", ""),
        ("raise", ""),
    ],
)
def test_what_one_call_does_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, why: str
) -> None:
    monkeypatch.setenv("CALLED", str(tmp_path))
    monkeypatch.setattr("grpo_mega.reward.user_functions.GRACE_SECONDS", 1.0)
    with talk("Breaks", seconds=3.0) as conversation:
        samples = conversation.go_on([say(what if number == 2 else "a", number) for number in range(4)], 200)
        wrong = samples.pop(2)
        assert [replies(sample) for sample in samples] == [["a"]] * 3
        (score,) = conversation.scores(lambda scored: [Score(1.0, {}) for _ in scored], [wrong])
        assert why in score.unscorable
        assert bool(score.unscorable) is bool(why)
        assert [call.error for call in wrong.calls] == ([] if why else [what == "raise"])
        again = conversation.go_on([say_more(sample, "b") for sample in samples], 200)
    assert [replies(sample) for sample in again] == [["a", "ab"]] * 3, "lost objects were made again"


@pytest.mark.parametrize("what", ["forged", "deep", "cancels", pytest.param("busy", marks=pytest.mark.long)])
def test_no_call_takes_the_others_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Forged answers and cancelled tasks end the process, and the others are asked again; being busy costs no time of
    theirs."""
    monkeypatch.setenv("CALLED", str(tmp_path))
    monkeypatch.setenv("BUSY", str(limit(2.0) + 1.0))
    with talk("Hostile", seconds=2.0) as conversation:
        samples = conversation.go_on([say(what if number == 2 else "a", number) for number in range(4)], 200)
        assert [replies(sample) for number, sample in enumerate(samples) if number != 2] == [["a"]] * 3


@pytest.mark.long
def test_a_close_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it end the process, whose other calls would be made again."""
    monkeypatch.setenv("CALLED", str(tmp_path))
    with talk("Unclosed", seconds=1.0) as conversation:
        process = conversation._workers._each[0]._process.pid
        samples = conversation.go_on([say("hang" if number else "a", number) for number in range(4)], 200)
        assert [sample.finish_reason for sample in samples] == [TURN, "abort", "abort", "abort"]
        assert conversation._workers._each[0]._process.pid == process


def test_what_must_be_awaited_and_is_not_declared_leaves_samples_without_a_score() -> None:
    """The model could not read what is wrong."""
    with talk("decorated") as conversation:
        (sample,) = conversation.go_on([say("a")], 200)
        (score,) = conversation.scores(lambda scored: [Score(1.0, {}) for _ in scored], [sample])
    assert "write it as `async def decorated`" in score.unscorable


def test_a_wrapped_async_function_is_async() -> None:
    assert load("waiting_environments:wrapped").is_async
    assert not load("waiting_environments:decorated").is_async


def test_each_call_of_a_turn_draws_what_it_draws_alone() -> None:
    """Although the generators are shared with the calls of other samples in between."""
    turn = json.dumps([{"name": "draw", "arguments": {"word": word}} for word in "ab"])

    async def replies(*keys: str) -> list[str]:
        asked = (episode.reply({}, key, key[0], [turn], "waiting_environments:Draws", 100) for key in keys)
        return [reply["text"] for reply in await asyncio.gather(*asked)]

    (alone,) = asyncio.run(replies("p1"))
    assert asyncio.run(replies("q1", "p2", "r1"))[1] == alone
    assert len({*alone.split()}) == 2


def test_the_longest_opening_is_that_of_an_async_reset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert longest_opening("waiting_environments:Hostile", [say("a").prompt], HostileTokenizer()) == 40


def test_no_thread_is_left_of_a_conversation_that_ends_in_the_middle_of_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CALLED", str(tmp_path))
    before = {*threading.enumerate()}
    with talk("Breaks") as conversation:
        assert conversation.go_on([say("a", number) for number in range(3)], 200, wait=0) == []
        while len([*tmp_path.iterdir()]) < 3:
            pass
    for thread in {*threading.enumerate()} - before:
        thread.join(limit(60.0))
        assert not thread.is_alive()


def test_a_tool_that_is_not_async_may_have_a_loop_of_its_own() -> None:
    with talk("own_loop") as conversation:
        (sample,) = conversation.go_on([say("a")], 200)
    assert replies(sample) == ["a"]


class Search(BaseHTTPRequestHandler):
    """Answers once eight requests are under way."""

    eight = threading.Barrier(8)

    def do_GET(self) -> None:
        self.eight.wait()
        found = parse_qs(urlsplit(self.path).query)["q"][0].upper().encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(found)))
        self.end_headers()
        self.wfile.write(found)

    def log_message(self, *words: object) -> None:
        pass


def test_the_documented_tool_asks_a_service_for_all_samples_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documented = (REPOSITORY / "docs" / "environments.md").read_text()
    (program,) = re.findall(r"^```python\n(import httpx\n.*?)^```$", documented, re.DOTALL | re.MULTILINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), Search) as server:
        threading.Thread(target=server.serve_forever).start()
        address = f"http://127.0.0.1:{server.server_port}"
        (tmp_path / "search_tools.py").write_text(program.replace("http://search.internal:8000", address))
        config = EnvironmentConfig(path="search_tools:search", open="", close="=", at_once=1, seconds=limit(60.0))
        with closing(Conversation(config, HostileTokenizer(), 400, 0)) as conversation:
            samples = conversation.go_on([say(letter, number) for number, letter in enumerate("abcdefgh")], 200)
        server.shutdown()
    assert {sample.finish_reason for sample in samples} == {TURN}
    assert not any(sample.calls[0].error for sample in samples)
