"""A stop loses nothing in any stage: base model, cold start and GRPO that were stopped end as if left in peace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from metric_lines import held_out, repeated, unexplained
from ranks import results, run_ranks
from train_jobs import contents, numbers, saved, without_seconds

JOB = Path(__file__).with_name("stage_stops_job.py")
OVERRIDES = ["layout=ep2", "sft.steps=4", "sft.warmup_steps=2", "sft.batch_size=8", "sft.save_every=3"]
OVERRIDES += ["run.steps=1", "run.eval_every=0", "run.name=staged", "run.tensorboard=false"]
STOPS = {
    "update:4": "stopped in step 5 of pretrain; {}/1-pretrain-step-000004 is saved",
    "update:13": "stopped in step 3 of sft; {}/2-sft-step-000002 is saved",
    "begin": "stopped before the first step; {}/2-sft-step-000004 is saved",
}
"""When one rank of two is asked to stop, start by start -> what is said. The base model takes 10 + 5 updates."""


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder with a run left in peace and one that was stopped, and how the latter's starts ended."""
    root = tmp_path_factory.mktemp("stages")
    tasks = [[str(root / "peace"), OVERRIDES, "end"]]
    tasks += [[str(root / "stopped"), OVERRIDES, moment] for moment in (*STOPS, "end")]
    peace, *stopped = results(run_ranks(JOB, 2, [json.dumps(tasks)]))
    assert peace == "completed"
    return root, stopped


def test_every_stage_stops_where_nothing_is_lost_and_says_where(ends):
    root, (*stopped, last) = ends
    checkpoints = root / "stopped" / "staged" / "checkpoints"
    expected = [f"{words.format(checkpoints)}, the same command continues there" for words in STOPS.values()]
    assert stopped == expected
    assert last == "completed"


def test_weights_numbers_and_samples_are_those_of_the_run_in_peace(ends):
    peace, stopped = (ends[0] / name / "staged" for name in ("peace", "stopped"))
    assert saved(stopped / "checkpoints" / "step-000001") == saved(peace / "checkpoints" / "step-000001")
    assert numbers(stopped) == numbers(peace)
    assert held_out(stopped) == held_out(peace)
    assert contents(stopped / "samples") == contents(peace / "samples")
    assert without_seconds(stopped / "summary.json") == without_seconds(peace / "summary.json")
    assert [p.name for p in (stopped / "checkpoints").iterdir()] == ["step-000001"]


@pytest.mark.parametrize(("stage", "steps"), [("pretrain", 15), ("sft", 4)])
def test_every_step_of_earlier_stages_has_one_line(ends, stage, steps):
    peace, stopped = (_lines(ends[0] / name / "staged" / f"{stage}.jsonl") for name in ("peace", "stopped"))
    assert not unexplained(peace)
    assert [line["step"] for line in peace] == list(range(1, steps + 1))
    assert all(line[f"{'base' if stage == 'pretrain' else 'sft'}/loss"] > 0 for line in peace)
    assert stopped == peace


def test_the_cached_base_model_is_the_same(ends):
    first, second = (next((ends[0] / name / "base-models").iterdir()) for name in ("peace", "stopped"))
    assert first.name == second.name
    assert saved(first) == saved(second)


def _lines(path: Path) -> list[dict[str, float]]:
    return [repeated(json.loads(line)) for line in path.read_text().splitlines()]
