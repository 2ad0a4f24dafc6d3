"""A stop changes nothing: a run that is continued, interrupted and killed ends bit for bit as one left in peace."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from metric_lines import held_out
from train_jobs import SMALL, Ended, Job, contents, half_written, numbers, rewarded_by, saved, without_seconds
from train_rewards import HOLD

pytestmark = pytest.mark.long

OVERRIDES = [
    *SMALL,
    rewarded_by("varied"),
    "algorithm.kl_coef=0.05",
    "optimizer.average_decay=0.5",
    "algorithm.mini_batches=2",
    "algorithm.epochs=2",
    "algorithm.reference_refresh=3",
    "optimizer.warmup_steps=6",
    "run.save_every=2",
]
"""Everything that a checkpoint must bring back: moments, reference, warm-up, order of problems and mini-batches."""
UPDATES = 4
"""Of a step, two epochs of two mini-batches: what a policy's version rises by."""


@dataclass
class Story:
    """What happened to one run, start by start."""

    path: Path
    ends: dict[str, Ended] = field(default_factory=dict)
    contents: dict[str, dict[str, str]] = field(default_factory=dict)

    def note(self, moment: str, ended: Ended) -> None:
        self.ends[moment] = ended
        self.contents[moment] = contents(self.path)


@pytest.fixture(scope="module")
def peaceful(finished) -> Path:
    """Four steps at once."""
    ended = Job(finished.root, [*OVERRIDES, "run.name=peaceful", "run.steps=4"], ranks=2).finish()
    assert ended.code == 0, ended
    return finished.root / "runs" / "peaceful"


@pytest.fixture(scope="module")
def story(finished) -> Story:
    """Two steps; on to four, Ctrl-C twice in the fourth; again, kill -9 in the fourth; again, to the end; once more."""
    root, told = finished.root, Story(finished.root / "runs" / "disturbed")
    overrides = [*OVERRIDES, "run.name=disturbed"]
    told.note("two steps", Job(root, [*overrides, "run.steps=2"], ranks=2).finish())
    overrides += ["run.steps=4"]

    held = root / "held-1.twice"
    job = Job(root, overrides, ranks=2, environment={HOLD: f"{3 * UPDATES}:{held}"}, cold=True)
    job.wait_until_there(held)
    told.contents["held"] = contents(told.path)
    told.note("rival", Job(root, [*overrides, "layout=single"]).finish())
    job.interrupt_twice()
    told.note("Ctrl-C", job.finish())

    held = root / "held-2"
    job = Job(root, overrides, ranks=2, environment={HOLD: f"{3 * UPDATES}:{held}"}, cold=True)
    job.wait_until_there(held)
    job.kill()
    told.note("kill -9", job.finish())
    # What a kill while step 4 is saved would leave.
    leftover = told.path / "checkpoints" / ".step-000004.tmp" / "weights"
    leftover.mkdir(parents=True)
    (leftover / "__0_0.distcp").write_bytes(b"half")
    (told.path / "checkpoints" / "step-000003").mkdir()

    told.note("end", Job(root, overrides, ranks=2).finish())
    told.note("nothing left", Job(root, overrides, ranks=2).finish())
    return told


def test_every_start_ends_as_it_should_without_orphans(story):
    failed = {moment: ended.code != 0 for moment, ended in story.ends.items()}
    expected = {"two steps": False, "rival": True, "Ctrl-C": True, "kill -9": True, "end": False, "nothing left": False}
    assert failed == expected, story.ends
    assert not any(ended.orphans for ended in story.ends.values()), story.ends


def test_a_second_ctrl_c_ends_the_run_at_once_and_leaves_nothing_half_written(story):
    said = "SIGINT received, stopping where no work is lost; another Ctrl-C ends it at once"
    assert said in story.ends["Ctrl-C"].stderr
    left = story.contents["Ctrl-C"]
    assert not [name for name in left if ".tmp" in name]
    assert {name.split("/")[1] for name in left if name.startswith("checkpoints/")} == {"step-000002"}


def test_a_run_in_progress_has_no_summary(story):
    assert "summary.json" in story.contents["two steps"]
    for moment in ("held", "Ctrl-C", "kill -9"):
        assert "summary.json" not in story.contents[moment], moment


def test_run_directory_of_a_live_run_is_refused_and_left_alone(story):
    assert "disturbed: is in use by pid" in story.ends["rival"].stderr
    assert "run.name" in story.ends["rival"].stderr
    assert story.contents["rival"] == story.contents["held"]


@pytest.mark.parametrize("moment", ["Ctrl-C", "kill -9", "end"])
def test_each_start_continues_behind_the_newest_checkpoint(story, moment):
    assert "continuing after step 2" in story.ends[moment].stderr
    assert "base model" not in story.ends[moment].stderr


def test_final_checkpoint_is_bit_for_bit_that_of_the_run_in_peace(story, peaceful):
    expected = saved(peaceful / "checkpoints" / "step-000004")
    assert {"weights", "reference", "state"} <= {name.split("/")[0] for name in expected}
    assert saved(story.path / "checkpoints" / "step-000004") == expected


def test_metrics_are_those_of_the_run_in_peace(story, peaceful):
    assert [line["step"] for line in numbers(story.path)] == [1, 2, 3, 4]
    assert all(line["policy/grad_norm"] > 0 and "policy/kl" in line for line in numbers(peaceful))
    assert numbers(story.path) == numbers(peaceful)
    assert held_out(story.path) == held_out(peaceful)


def test_samples_and_summary_are_those_of_the_run_in_peace(story, peaceful):
    assert contents(story.path / "samples") == contents(peaceful / "samples")
    assert without_seconds(story.path / "summary.json") == without_seconds(peaceful / "summary.json")
    assert half_written(story.path) == []


def test_with_nothing_left_to_do_it_says_so_and_is_completed_at_once(story):
    assert [m for m, ended in story.ends.items() if "nothing is left to train" in ended.stderr] == ["nothing left"]
    assert "disturbed completed: 4 steps" in story.ends["nothing left"].stderr.replace("\n", " ")
    before, after = story.contents["end"], story.contents["nothing left"]
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert {name.split("/")[0] for name in changed} <= {
        "logs", "flight", "trace", "summary.json", "tensorboard", "curves.png", "report.html",
    }  # fmt: skip
