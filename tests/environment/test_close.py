"""Every episode of a class with `close` is closed when it ends, whoever asks for its reward."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import psutil
import pytest
from limits import limit
from test_conversation import HostileTokenizer, say, say_more

from grpo_mega.config.schema import EnvironmentConfig
from grpo_mega.environment.conversation import Conversation
from grpo_mega.errors import InputError
from grpo_mega.types import Sample, Score


@pytest.fixture
def closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paths: None) -> Path:
    """The file in which the environment says what was closed."""
    monkeypatch.setenv("CLOSED", str(tmp_path / "closed"))
    return tmp_path / "closed"


def played(calls: list[str], rewarded: bool) -> list[Score]:
    """Scores of samples that make two calls each, the second of these."""
    settings = EnvironmentConfig(
        path="closing_environments:Closes", open="", close="=", at_once=2, seconds=limit(2.0), max_calls=2
    )
    with closing(Conversation(settings, HostileTokenizer(), 200, 0, rewarded)) as conversation:
        begun = conversation.go_on([say("a", number) for number in range(len(calls))], 200)
        samples = conversation.go_on([say_more(one, call) for one, call in zip(begun, calls, strict=True)], 200)

        def score(kept: list[Sample]) -> list[Score]:
            return [Score(1.0, {}) for _ in kept]

        return conversation.scores(score, samples)


@pytest.mark.parametrize("rewarded", [False, True])
def test_an_episode_is_closed_once_when_it_ends(closed: Path, rewarded: bool) -> None:
    scores = played(["b", "c", "d", "e", "f"], rewarded)
    assert not any(score.unscorable for score in scores)
    assert sorted(closed.read_text().splitlines()) == ["p/0 b", "p/1 c", "p/2 d", "p/3 e", "p/4 f"]


def test_a_close_that_hangs_ends_its_process_and_costs_no_score(closed: Path, caplog: pytest.LogCaptureFixture) -> None:
    scores = played(["hang", "c", "d"], rewarded=False)
    assert [(score.total, score.unscorable) for score in scores] == [(1.0, "")] * 3
    assert {"p/0 hang", "p/1 c"} <= {*closed.read_text().splitlines()}
    (said,) = [record.getMessage() for record in caplog.records if "close of" in record.getMessage()]
    assert said.startswith("environment.path=closing_environments:Closes: close of problem p/0, sample 0 ended")


def test_no_process_is_started_only_to_close_what_was_lost(
    closed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMPORTS", str(tmp_path / "imports"))
    settings = EnvironmentConfig(path="closing_environments:Closes", open="", close="=", at_once=1)
    with closing(Conversation(settings, HostileTokenizer(), 200, 0)) as conversation:
        kept = conversation.go_on([say("a")], 200)
        conversation.go_on([say("exit", 1)], 200)
        (score,) = conversation.scores(lambda samples: [Score(1.0, {}) for _ in samples], kept)
    assert (score.total, closed.exists()) == (1.0, False)
    assert (tmp_path / "imports").read_text() == "imported\n"


def test_refused_settings_leave_no_process() -> None:
    before = {*psutil.Process().children(recursive=True)}
    settings = EnvironmentConfig(path="closing_environments:Closes", open="", close="@", at_once=2)
    with pytest.raises(InputError, match=r"environment\.close"):
        Conversation(settings, HostileTokenizer(), 200, 0)
    assert {*psutil.Process().children(recursive=True)} <= before


def test_an_episode_that_does_not_begin_is_closed(closed: Path) -> None:
    settings = EnvironmentConfig(path="closing_environments:Unready", open="", close="=", at_once=1)
    with closing(Conversation(settings, HostileTokenizer(), 200, 0)) as conversation:
        (sample,) = conversation.go_on([say("a")], 200)
    assert sample.finish_reason == "abort"
    assert closed.read_text() == "p/0\n"
