"""Asked to stop, a run finishes its step and saves; a damaged checkpoint is noticed and the one before it is used."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
from train_jobs import SMALL, Job, numbers, rewarded_by
from train_rewards import HOLD

OVERRIDES = [*SMALL, "layout=single", rewarded_by("varied"), "run.steps=4", "run.save_every=2", "run.eval_every=0"]


@pytest.fixture(scope="module")
def peaceful(finished) -> Path:
    """Four steps at once, on one rank."""
    ended = Job(finished.root, [*OVERRIDES, "run.name=in-peace"]).finish()
    assert ended.code == 0, ended
    return finished.root / "runs" / "in-peace"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_the_step_in_progress_and_the_run_goes_on_from_there(finished, peaceful, number):
    overrides = [*OVERRIDES, f"run.name={number.name}"]
    held = finished.root / f"held-{number.name}"
    job = Job(finished.root, overrides, environment={HOLD: f"2:{held}"})
    job.wait_until_there(held)
    job.process.send_signal(number)
    ended = job.finish()
    assert ended.code == 75, ended
    assert "stopped after step 3" in ended.stderr
    path = finished.root / "runs" / number.name
    assert (path / "checkpoints" / "step-000003" / "manifest.json").is_file()
    again = Job(finished.root, overrides).finish()
    assert again.code == 0, again
    assert "continuing behind step 3" in again.stderr
    assert numbers(path) == numbers(peaceful)


def test_torchrun_passes_the_signal_on_and_all_ranks_agree(finished):
    held = finished.root / "held-torchrun"
    overrides = [*OVERRIDES, "layout=ep2", "run.name=torchrun"]
    job = Job(finished.root, overrides, ranks=2, environment={HOLD: f"1:{held}"})
    job.wait_until_there(held)
    job.process.terminate()
    ended = job.finish()
    assert ended.code != 0
    assert not ended.orphans
    assert "stopped after step 2" in ended.stderr
    assert (finished.root / "runs" / "torchrun" / "checkpoints" / "step-000002" / "manifest.json").is_file()


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def altered(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "told"), [(truncated, "bytes instead of"), (altered, "differs"), (Path.unlink, "missing")]
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(finished, peaceful, harm, told):
    path = peaceful.with_name(f"damaged-{told.split()[0]}")
    shutil.copytree(peaceful, path)
    shards = sorted((path / "checkpoints" / "step-000004" / "weights").glob("*.distcp"))
    harm(shards[0])
    # The copy is another run by name only.
    (path / "run.json").write_text((path / "run.json").read_text().replace("in-peace", path.name))
    ended = Job(finished.root, [*OVERRIDES, f"run.name={path.name}"]).finish()
    assert ended.code == 0, ended
    said = ended.stderr.replace("\n", " ")
    assert "step-000004 is damaged" in said
    assert told in said
    assert "step-000002 instead" in said
    assert "continuing behind step 2" in said
    assert numbers(path) == numbers(peaceful)


def test_when_every_checkpoint_is_damaged_nothing_is_thrown_away(finished, peaceful):
    path = peaceful.with_name("all-damaged")
    shutil.copytree(peaceful, path)
    for shard in (path / "checkpoints").rglob("*.distcp"):
        truncated(shard)
    (path / "run.json").write_text((path / "run.json").read_text().replace("in-peace", path.name))
    before = (path / "metrics.jsonl").read_bytes()
    ended = Job(finished.root, [*OVERRIDES, f"run.name={path.name}"]).finish()
    assert ended.code == 2, ended
    assert "every checkpoint is damaged" in ended.stderr
    assert (path / "metrics.jsonl").read_bytes() == before


def test_a_signal_before_the_first_step_ends_the_run_and_its_helpers_at_once(finished):
    held = finished.root / "held-early"
    # Policy version 0 is held by the evaluation that comes before the first step, when the base model is saved already.
    overrides = [*OVERRIDES, "run.name=early", "run.seed=1"]
    job = Job(finished.root, overrides, environment={HOLD: f"0:{held}"})
    job.wait_until_there(held)
    job.process.terminate()
    ended = job.finish()
    assert ended.code == 75, ended
    assert "stopped before the first step" in ended.stderr
    assert not ended.orphans
