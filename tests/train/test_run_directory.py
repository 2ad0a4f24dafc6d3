"""What a run under torchrun leaves behind."""

from __future__ import annotations

import json
import math
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import yaml
from metric_lines import held_out, of_steps
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from train_jobs import SMALL, Job, rewarded_by

from grpo_mega.config.load import compose_config, to_yaml

SUMMARY = {
    "status", "steps", "held_out_accuracy_before", "held_out_accuracy_after", "format_rate_before",
    "format_rate_after", "mean_length_before", "mean_length_after", "tokens_trained", "tokens_generated", "seconds",
    "layout", "versions",
}  # fmt: skip
SAMPLES = 8 * 4
PNG = b"\x89PNG\r\n\x1a\n"


def test_ends_with_everything_in_place_and_no_process_left(finished):
    assert finished.ended.orphans == []
    assert "first completed: 3 steps" in finished.ended.stderr.replace("\n", " ")
    assert str(finished.path) in finished.ended.stderr.replace("\n", "").replace(" ", "")
    top = {p.name for p in finished.path.iterdir()}
    files = {"config.yaml", "metrics.jsonl", "curves.png", "report.html"}
    assert files | {"samples", "tensorboard", "logs", "checkpoints"} <= top
    assert not [name for name in finished.contents if name.endswith(".tmp")]


def test_config_is_the_whole_resolved_run(finished):
    written = (finished.path / "config.yaml").read_text()
    overrides = [*finished.overrides, f"run.root={finished.root / 'runs'}"]
    assert written == to_yaml(compose_config(overrides))
    assert json.loads((finished.path / "words.json").read_text()) == overrides
    assert yaml.safe_load(written)["layout"]["ep"] == 2


def test_metrics_have_one_line_per_step_of_finite_numbers(finished):
    assert [line["step"] for line in finished.metrics] == [1, 2, 3]
    for line in finished.metrics:
        assert all(isinstance(value, int | float) and math.isfinite(value) for value in line.values()), line
        assert line["rollout/groups_with_signal"] > 0
        assert {"reward/own", "policy/loss", "policy/grad_norm", "policy/lr", "time/generate"} <= set(line)
        assert line["rollout/tokens"] == pytest.approx(line["rollout/length_mean"] * SAMPLES)
        assert line["machine/tokens_per_second"] * line["time/step"] == pytest.approx(line["rollout/tokens"])
        assert 0.1 < line["machine/peak_memory_gb"] < 16, "what a process with torch needs, in units of 10^9 bytes"
    assert ["eval/accuracy" in line for line in finished.metrics] == [False, True, False]


def test_held_out_results_before_and_after_have_lines_of_their_own(finished):
    before, after = held_out(finished.path)
    assert (before["step"], after["step"]) == (0, 3)
    for line, when in ((before, "before"), (after, "after")):
        assert line["eval/heldout/accuracy"] == finished.summary[f"held_out_accuracy_{when}"]
        assert line["eval/heldout/format"] == finished.summary[f"format_rate_{when}"]
        assert line["eval/heldout/length"] == finished.summary[f"mean_length_{when}"]
    events = EventAccumulator(str(finished.path / "tensorboard"))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("eval/heldout/length")]
    assert shown == [(line["step"], pytest.approx(line["eval/heldout/length"])) for line in (before, after)]


def test_engine_and_trainer_agree_at_every_step(finished):
    assert all(line["mismatch/max_abs"] < 1e-5 for line in finished.metrics)
    assert all(abs(line["mismatch/effective_sample_size"] - 1) < 1e-5 for line in finished.metrics)


def test_summary_says_what_was_achieved(finished):
    summary = finished.summary
    assert set(summary) >= SUMMARY
    assert (summary["status"], summary["steps"]) == ("completed", 3)
    assert summary["layout"]["ep"] == summary["layout"]["dp"] == 2
    assert summary["versions"]["torch"] == version("torch")
    for name in SUMMARY - {"status", "seconds", "layout", "versions"}:
        assert math.isfinite(summary[name]), name
    assert {"base", "generate", "reward", "logprobs", "update", "evaluate", "checkpoint"} <= set(summary["seconds"])
    assert all(seconds >= 0 for seconds in summary["seconds"].values())


def test_tokens_add_up(finished):
    generated = [round(line["rollout/length_mean"] * 8 * 4) for line in finished.metrics]
    assert finished.summary["tokens_generated"] == sum(generated)
    assert 0 < finished.summary["tokens_trained"] <= sum(generated)


def test_samples_are_those_that_were_scored(finished):
    followed, *files = sorted((finished.path / "samples").iterdir())
    assert followed.name == "followed-000002.jsonl"
    assert [file.name for file in files] == [f"step-{step:06d}.jsonl" for step in (1, 2, 3)]
    for step, file in enumerate(files, start=1):
        records = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(records) == 4
        for record in records:
            total = record["accuracy"] + 0.2 * record["format"] + record["own"]
            assert math.isclose(record["reward"], total)
            assert record["policy_version"] == step - 1
            assert 1 <= record["tokens"] <= 16


def test_every_rank_has_a_log_and_every_kept_step_a_whole_checkpoint(finished):
    assert {p.name for p in (finished.path / "logs").iterdir()} == {"rank-0.log", "rank-1.log"}
    checkpoints = sorted((finished.path / "checkpoints").iterdir())
    assert [p.name for p in checkpoints] == ["step-000002", "step-000003"]
    assert all(json.loads((p / "state.json").read_text())["step"] == int(p.name[-6:]) for p in checkpoints)


def test_curves_are_a_picture_and_tensorboard_has_events(finished):
    from matplotlib import image
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    picture = finished.path / "curves.png"
    assert picture.read_bytes().startswith(PNG)
    assert image.imread(picture).std() > 0
    events = EventAccumulator(str(finished.path / "tensorboard")).Reload()
    rewards = [event.value for event in events.Scalars("reward/mean")]
    torch.testing.assert_close(rewards, [line["reward/mean"] for line in finished.metrics])


def test_base_model_was_cached_whole(finished):
    (base,) = (finished.root / "runs" / "base-models").iterdir()
    assert Path(base, "state.json").is_file()


def test_each_sample_is_scored_once_for_all_ranks(finished):
    overrides = [*SMALL, "layout=tp2", rewarded_by("which_rank"), "run.name=scored-once", "run.steps=2"]
    ended = Job(finished.root, overrides, ranks=2).finish()
    assert ended.code == 0, ended
    lines = of_steps(finished.root / "runs" / "scored-once")
    # Both tensor parallel ranks trained on the same rewards: half of them from either.
    assert [line["reward/own"] for line in lines] == [0.5, 0.5]
    assert all(line["policy/grad_norm"] > 0 for line in lines)
