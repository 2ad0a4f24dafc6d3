"""run.async_save: training goes on while a checkpoint is written, and no bit of it or of the run differs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from train_jobs import SMALL, Ended, Job, contents, half_written, numbers, rewarded_by, saved
from train_rewards import HOLD

pytestmark = pytest.mark.long

OVERRIDES = [
    *SMALL,
    rewarded_by("varied"),
    "optimizer.distributed=true",
    "optimizer.overlap=true",
    "algorithm.kl_coef=0.05",
    "optimizer.average_decay=0.5",
    "algorithm.reference_refresh=2",
    "run.steps=5",
    "run.save_every=1",
    "run.keep_checkpoints=9",
    "run.eval_every=0",
]
STEPS = [f"step-{step:06d}" for step in (1, 2, 3, 4, 5)]


@dataclass
class Story:
    """A run that saves in the background: stopped in step 3, then killed in step 5, then left to finish."""

    path: Path
    ends: dict[str, Ended] = field(default_factory=dict)
    present: dict[str, set[str]] = field(default_factory=dict)
    """Names in the folder of checkpoints: while held, and after each end."""

    def note(self, moment: str, ended: Ended | None = None) -> None:
        if ended:
            self.ends[moment] = ended
        self.present[moment] = {path.name for path in (self.path / "checkpoints").iterdir()}


@pytest.fixture(scope="module")
def waiting(finished) -> Path:
    """The run that waits for each of its checkpoints."""
    ended = Job(finished.root, [*OVERRIDES, "run.name=waiting"], ranks=2).finish()
    assert ended.code == 0, ended
    return finished.root / "runs" / "waiting"


@pytest.fixture(scope="module")
def story(finished) -> Story:
    root, told = finished.root, Story(finished.root / "runs" / "background")
    overrides = [*OVERRIDES, "run.name=background", "run.async_save=true"]
    for moment, version in (("stopped", 2), ("killed", 4)):
        held = root / f"held-{moment}"
        job = Job(root, overrides, ranks=2, environment={HOLD: f"{version}:{held}"}, cold=True)
        job.wait_until_there(held)
        told.note(f"before {moment}")
        if moment == "stopped":
            job.process.terminate()
        else:
            job.kill()
        told.note(moment, job.finish())
    told.note("end", Job(root, overrides, ranks=2).finish())
    return told


def test_training_goes_on_before_a_checkpoint_has_its_name(story):
    assert story.present["before stopped"] == {STEPS[0], f".{STEPS[1]}.tmp"}


def test_a_stop_completes_the_checkpoint_in_progress_and_writes_no_other(story):
    assert "stopped in step 3 before its first update" in story.ends["stopped"].stderr
    assert story.present["stopped"] == {*STEPS[:2]}


def test_a_kill_leaves_the_checkpoint_before_in_use(story):
    assert story.present["before killed"] == story.present["killed"] == {*STEPS[:3], f".{STEPS[3]}.tmp"}
    assert story.ends["end"].code == 0, story.ends["end"]
    assert "continuing after step 3" in story.ends["end"].stderr


def test_every_checkpoint_is_bit_for_bit_that_of_the_run_that_waited(story, waiting):
    for step in STEPS:
        expected = saved(waiting / "checkpoints" / step)
        assert any(name.startswith("weights/") for name in expected)
        assert saved(story.path / "checkpoints" / step) == expected
    assert numbers(story.path) == numbers(waiting)
    assert contents(story.path / "samples") == contents(waiting / "samples")


def test_nothing_is_left_behind_and_the_log_says_what_is_complete(story):
    assert half_written(story.path) == []
    assert not any(ended.orphans for ended in story.ends.values())
    log = (story.path / "logs" / "rank-0.log").read_text()
    assert all(f"{step} is complete" in log for step in STEPS)
