"""What a run writes and prints, put together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_mega.config.schema import RunConfig
from grpo_mega.observe.metrics import read_metrics
from grpo_mega.observe.recorder import Recorder
from grpo_mega.types import Group, Prompt, Sample

PROMPT = Prompt("p/1", (1, 2), "1+1=?", "2", "sums")


def answer(index: int, text: str) -> Sample:
    return Sample(PROMPT, index, (3,), (-0.5,), "stop", ((0, 0),), text, None)


def test_the_sample_that_is_printed_is_the_first_of_its_group_as_in_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts, rewards = ("poor", "perfect", "worse"), (0.2, 1.0, 0.0)
    group = Group(tuple(answer(i, text) for i, text in enumerate(texts)), rewards, {"accuracy": rewards})
    recorder = Recorder(RunConfig(name="mine", steps=1, tensorboard=False), tmp_path, main=True)
    recorder.open_metrics(resume_from_step=-1)
    recorder.step(1, {"reward/mean": 0.4}, [group])
    recorder.close()
    said = capsys.readouterr().err
    assert "| 1+1=? -> poor  [answer 2, reward 0.20]" in said
    assert "perfect" not in said
    assert json.loads((tmp_path / "samples" / "step-000001.jsonl").read_text())["completion"] == "poor"


def test_held_out_results_go_into_the_metrics_and_others_do_not(tmp_path: Path) -> None:
    recorder = Recorder(RunConfig(name="mine", steps=1, tensorboard=False), tmp_path, main=True)
    recorder.evaluation(150, "base model", {"accuracy": 0.1})
    recorder.open_metrics(resume_from_step=-1)
    recorder.evaluation(0, "held-out", {"accuracy": 0.25, "length": 20.0})
    recorder.evaluation(1, "validation", {"accuracy": 0.5})
    recorder.close()
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert line == {"step": 0, "eval/heldout/accuracy": 0.25, "eval/heldout/length": 20.0}
