"""What a run writes and prints, put together."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import pytest

from grpo_mega.config.schema import RunConfig
from grpo_mega.observe.metrics import read_metrics
from grpo_mega.observe.recorder import Recorder
from grpo_mega.observe.samples import sample_record
from grpo_mega.types import Prompt, Sample, Score

PROMPT = Prompt("p/1", (1, 2), "1+1=?", "2", "sums")


def answer(index: int, text: str) -> Sample:
    return Sample(PROMPT, index, array("i", [3]), array("f", [-0.5]), "stop", ((0, 4),), text, None)


SHOWN = [
    sample_record(answer(0, text), Score(0.2, {"accuracy": 0.2}, reason))
    for text, reason in (("poor", "a guess"), ("b", ""))
]
AS_WRITTEN = (
    '{"prompt_id": "p/1", "prompt": "1+1=?", "answer": "2", "completion": "poor", "reward": 0.2, "accuracy": 0.2, '
    '"reason": "a guess", "tokens": 1, "finish_reason": "stop", "policy_version": 4}\n'
)


@pytest.mark.parametrize("written", [0, 1, 2])
def test_samples_are_written_and_printed_in_their_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], written: int
) -> None:
    """So many into the file, byte for byte, and two are printed whatever is written."""
    run = RunConfig(name="mine", steps=1, tensorboard=False, samples_per_step=written)
    recorder = Recorder(run, tmp_path, main=True)
    assert recorder.samples_wanted == 2
    recorder.open_metrics(resume_from_step=-1)
    recorder.step(1, {"reward/mean": 0.4}, SHOWN)
    recorder.close()
    said = capsys.readouterr().err
    assert "| 1+1=? -> poor  [answer 2, reward 0.20]" in said
    assert said.index("-> poor") < said.index("-> b ")
    lines = (tmp_path / "samples" / "step-000001.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == written
    assert lines[:1] == [AS_WRITTEN][:written]
    assert "reason" not in "".join(lines[1:]).replace("finish_reason", "")


def test_held_out_results_go_into_the_metrics_and_others_do_not(tmp_path: Path) -> None:
    recorder = Recorder(RunConfig(name="mine", steps=1, tensorboard=False), tmp_path, main=True)
    recorder.evaluation(150, "base model", {"accuracy": 0.1})
    recorder.open_metrics(resume_from_step=-1)
    recorder.evaluation(0, "held-out", {"accuracy": 0.25, "length": 20.0})
    recorder.evaluation(1, "validation", {"accuracy": 0.5})
    recorder.close()
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert line == {"step": 0, "eval/heldout/accuracy": 0.25, "eval/heldout/length": 20.0}


def test_a_sample_that_could_not_be_scored_has_no_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither in the file nor on the console is it a 0."""
    recorder = Recorder(RunConfig(name="mine", steps=1, tensorboard=False, samples_per_step=1), tmp_path, main=True)
    recorder.open_metrics(resume_from_step=-1)
    recorder.step(1, {}, [sample_record(answer(0, "poor"), Score(0.0, {}, unscorable="the judge was away"))])
    recorder.close()
    assert "| 1+1=? -> poor  [answer 2, no score]" in capsys.readouterr().err
    record = json.loads((tmp_path / "samples" / "step-000001.jsonl").read_text())
    assert (record["reward"], record["unscorable"]) == (None, "the judge was away")
