"""What a run writes and prints, put together."""

from __future__ import annotations

import json
import logging
import os
import sys
from array import array
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from grpo_mega.config.schema import RunConfig
from grpo_mega.observe.metrics import read_metrics
from grpo_mega.observe.recorder import Observer, Recorder
from grpo_mega.observe.samples import sample_record
from grpo_mega.show.observers import observers_of
from grpo_mega.types import Prompt, Sample, Score

PROMPT = Prompt("p/1", (1, 2), "1+1=?", "2", "sums")


def recorder_of(run: RunConfig, path: Path) -> Recorder:
    """A recorder with all that shows such a run."""
    return Recorder(run, path, main=True, observers=lambda: observers_of(run, path))


def made(index: int, text: str) -> Sample:
    return Sample(PROMPT, index, array("i", [3]), array("f", [-0.5]), "stop", ((0, 4),), text, None)


def record(index: int, text: str, score: Score) -> dict[str, Any]:
    return sample_record(made(index, text), score, 0, lambda ids: "<eos>" * len([*ids]))


AS_WRITTEN = (
    '{"prompt_id": "p/1", "prompt": "1+1=?", "answer": "2", "completion": "poor", "group": 0, "sample": 1, '
    '"reward": 0.2, "accuracy": 0.2, "terms": {"accuracy": 0.2, "tokens": 1.5}, "reason": "a guess", "tokens": 1, '
    '"finish_reason": "stop", "policy_version": 4, "advantage": null, "token_texts": ["<eos>"], '
    '"engine_logprobs": [-0.5]}\n'
)


def test_samples_are_written_in_their_order_and_the_best_and_the_worst_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A term named like a field of the record is among the terms alone."""
    recorder = recorder_of(RunConfig(name="mine", steps=1, tensorboard=False), tmp_path)
    recorder.open_metrics(resume_from_step=-1)
    poor = Score(0.2, {"accuracy": 0.2, "tokens": 1.5}, "a guess")
    scores = {"between": Score(0.5, {}), "poor": poor, "good": Score(1.0, {})}
    shown = [record(index, text, score) for index, (text, score) in enumerate(scores.items())]
    recorder.step(1, {"reward/mean": 0.4}, shown)
    recorder.close()
    said = capsys.readouterr().err
    assert "| 1+1=? -> good  [best of 3, answer 2, reward 1.00]" in said
    assert "| 1+1=? -> poor  [worst of 3, answer 2, reward 0.20]" in said
    assert "between" not in said
    lines = (tmp_path / "samples" / "step-000001.jsonl").read_text().splitlines(keepends=True)
    assert [json.loads(line)["completion"] for line in lines] == [*scores]
    assert lines[1] == AS_WRITTEN
    assert '"reason"' not in lines[0] + lines[2]


def test_a_step_without_samples_has_no_file(tmp_path: Path) -> None:
    recorder = recorder_of(RunConfig(name="mine", steps=1, tensorboard=False), tmp_path)
    recorder.open_metrics(resume_from_step=-1)
    recorder.step(1, {"reward/mean": 0.4}, [])
    recorder.close()
    assert not (tmp_path / "samples").exists()


def test_answers_to_problems_that_are_followed_have_a_file_for_each_evaluation(tmp_path: Path) -> None:
    recorder = recorder_of(RunConfig(name="mine", steps=1, tensorboard=False), tmp_path)
    recorder.evaluation(20, "validation", {"accuracy": 0.5}, [record(0, "good", Score(1.0, {}))])
    recorder.evaluation(40, "validation", {"accuracy": 0.5}, [])
    recorder.close()
    assert [file.name for file in (tmp_path / "samples").iterdir()] == ["followed-000020.jsonl"]
    assert json.loads((tmp_path / "samples" / "followed-000020.jsonl").read_text())["completion"] == "good"


def test_held_out_results_go_into_the_metrics_and_others_do_not(tmp_path: Path) -> None:
    recorder = recorder_of(RunConfig(name="mine", steps=1, tensorboard=False), tmp_path)
    recorder.evaluation(150, "base model", {"accuracy": 0.1})
    recorder.open_metrics(resume_from_step=-1)
    recorder.evaluation(0, "held-out", {"accuracy": 0.25, "length": 20.0})
    recorder.evaluation(1, "validation", {"accuracy": 0.5})
    recorder.close()
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert line == {"step": 0, "eval/heldout/accuracy": 0.25, "eval/heldout/length": 20.0}


def test_a_sample_that_could_not_be_scored_has_no_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither in the file nor on the console is it a 0."""
    recorder = recorder_of(RunConfig(name="mine", steps=1, tensorboard=False), tmp_path)
    recorder.open_metrics(resume_from_step=-1)
    recorder.step(1, {}, [record(0, "poor", Score(0.0, {}, unscorable="the judge was away"))])
    recorder.close()
    assert "| 1+1=? -> poor  [first of 1, answer 2, no score]" in capsys.readouterr().err
    written = json.loads((tmp_path / "samples" / "step-000001.jsonl").read_text())
    assert (written["reward"], written["unscorable"]) == (None, "the judge was away")


def test_a_run_goes_on_without_what_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As where permission is missing, which root does not need: folders and files are in each other's place."""
    config = RunConfig(name="mine", steps=2, tensorboard=False, report_every=0, prometheus=str(tmp_path))
    recorder = recorder_of(config, tmp_path)
    recorder.open_metrics(resume_from_step=0)
    for name in ("experts.jsonl", "curves.png", "report.html", "grpo_mega_mine.prom"):
        (tmp_path / name).mkdir()
    (tmp_path / "samples").write_text("")
    for step in (1, 2):
        recorder.step(step, {"reward/mean": 0.4}, [record(0, "good", Score(1.0, {}))], {"2": [1.0, 3.0]})
    recorder.evaluation(2, "validation", {"accuracy": 0.5}, [record(0, "good", Score(1.0, {}))])
    recorder.finish({"status": "completed", "steps": 2})
    recorder.close()
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "completed"
    assert said(caplog) == ["experts.jsonl", "samples/", f"run.prometheus={tmp_path}", "curves.png"]
    caplog.clear()
    again = recorder_of(config, tmp_path)
    again.open_metrics(resume_from_step=2)
    again.close()
    assert said(caplog) == ["experts.jsonl", "report.html"]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the run goes on without, in the order in which the log says so, each time with the traceback."""
    records = [record for record in caplog.records if "the run goes on without it" in record.getMessage()]
    assert all("Traceback (most recent call last)" in logging.Formatter().format(record) for record in records)
    return [record.getMessage().split(": ")[0] for record in records]


class Broken:
    """In place of what shows: whatever it is asked for is an error, of a kind that nobody foresaw."""

    def __getattr__(self, name: str) -> Any:
        raise LookupError(f"{name} is broken")


def test_no_error_in_what_only_shows_ends_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each is said once, however often it comes, and all the rest of the step is recorded."""
    config = RunConfig(name="mine", steps=2, tensorboard=False, report_every=1, trackers=["mlflow"])
    config.tracker_project = None  # type: ignore[assignment]  # no tracker can be started
    shows = observers_of(config, tmp_path) | {"the plan": Broken, "what cannot be made": lambda: Broken().made()}
    recorder = Recorder(config, tmp_path, main=True, observers=lambda: shows | {"the console": Broken})
    recorder.open_metrics(resume_from_step=-1)
    for name in ("experts", "alarms"):
        setattr(recorder, name, Broken())
    assert recorder.metrics
    recorder.metrics._writer = Broken()
    recorder.start(["a line"], "here")
    recorder.note("a line")
    recorder.phase("generate")
    recorder.samples(1, 2)
    good = record(0, "good", Score(1.0, {}))
    for step in (1, 2):
        recorder.step(step, {"reward/mean": 0.4}, [good], {"2": [1.0, 3.0]})
    recorder.step(3, {"reward/mean": 0.4}, [good | {"reward": float("nan")}])
    recorder.evaluation(3, "held-out", {"accuracy": 0.5}, [good | {"reward": float("nan")}])
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 3]
    assert [file.name for file in sorted((tmp_path / "samples").iterdir())] == [
        "step-000001.jsonl", "step-000002.jsonl"
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").unlink()  # what curves.png is made of
    recorder.finish({"status": "completed", "steps": 3})
    recorder.close()
    assert json.loads((tmp_path / "summary.json").read_text()) == {"status": "completed", "steps": 3, "alarms": []}
    assert said(caplog) == [
        "what cannot be made", "the console", "run.trackers", "the plan", "run.tensorboard", "experts.jsonl",
        "the alarms", "samples/", "curves.png",
    ]  # fmt: skip
    assert "the console: LookupError: stage is broken; the run goes on without it" in caplog.messages


@pytest.mark.parametrize("closed", [False, True])
def test_a_console_that_nobody_reads_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, closed: bool
) -> None:
    """As after `grpo_mega ... | head`, when a terminal has gone, or where the stream was closed before."""
    read, write = os.pipe()
    os.close(read)
    with suppress(BrokenPipeError), os.fdopen(write, "w") as nobody:
        if closed:
            nobody.close()
        monkeypatch.setattr(sys, "stderr", nobody)
        recorder = recorder_of(RunConfig(name="mine", steps=2, tensorboard=False), tmp_path)
        recorder.open_metrics(resume_from_step=-1)
        for step in (1, 2):
            recorder.step(step, {"reward/mean": float("nan")}, [record(0, "good", Score(1.0, {}))])
        recorder.close()
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    assert len([*(tmp_path / "samples").iterdir()]) == 2
    assert recorder.alarms
    assert [*recorder.alarms.up] == ["not_finite"]
    assert said(caplog) == ["the console"]


def test_an_error_in_what_a_run_relies_on_ends_it(tmp_path: Path) -> None:
    recorder = recorder_of(RunConfig(name="mine", steps=2, tensorboard=False), tmp_path)
    recorder.open_metrics(resume_from_step=-1)
    with pytest.raises(ValueError, match="world_size"):
        recorder.finish({"status": "completed", "steps": 1, "world_size": float("nan")})
    with pytest.raises(ValueError, match="closed"):
        recorder.step(1, {"reward/mean": 0.4}, [])
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        recorder.open_metrics(resume_from_step=-1)
    recorder.close()


class Noting(Observer):
    """Notes what it is told, by its name."""

    def __init__(self, name: str, told: list[str], adds: dict[str, Any] | None = None) -> None:
        self.at_the_end, self._told, self._adds = f"end of {name}", told, adds
        self._name = name

    def phase(self, name: str) -> None:
        self._told.append(f"{self._name} hears {name}")

    def finish(self, summary: dict[str, Any]) -> dict[str, Any] | None:
        self._told.append(f"{self._name} finishes")
        return self._adds


def test_observers_finish_from_the_last_to_the_first_and_add_to_the_summary(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be written is left out with a line, and the run has completed all the same."""
    told: list[str] = []
    adds = {"first": None, "second": {"planned": float("nan")}, "third": {"planned": 3}}
    makers = {name: partial(Noting, name, told, more) for name, more in adds.items()}
    recorder = Recorder(RunConfig(name="mine", steps=1, tensorboard=False), tmp_path, True, lambda: makers)
    recorder.open_metrics(resume_from_step=-1)
    told.clear()
    recorder.finish({"status": "completed", "steps": 1})
    recorder.close()
    assert [line for line in told if "finishes" in line] == ["third finishes", "second finishes", "first finishes"]
    assert told.index("first hears end of third") < told.index("third finishes")
    assert json.loads((tmp_path / "summary.json").read_text())["planned"] == 3
    assert said(caplog) == ["second"]


def test_only_the_main_rank_makes_observers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def failing() -> dict[str, Any]:
        raise LookupError("no screen")

    run = RunConfig(name="mine", steps=1, tensorboard=False)
    Recorder(run, tmp_path, False, failing).note("a line")
    assert said(caplog) == []
    Recorder(run, tmp_path, True, failing).note("a line")
    assert said(caplog) == ["what shows the run"]
