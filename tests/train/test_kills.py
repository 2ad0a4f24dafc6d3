"""kill -9 at twenty random moments costs nothing but the work since the last checkpoint."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from metric_lines import held_out
from train_jobs import (
    SMALL,
    Ended,
    Job,
    contents,
    half_written,
    numbers,
    rewarded_by,
    saved,
    wait_until,
    without_seconds,
)

pytestmark = pytest.mark.long

KILLS = 20
STEPS = 40
OVERRIDES = [
    *(override for override in SMALL if not override.startswith("base.")),
    rewarded_by("varied"),
    "base=none",
    "layout=single",
    "algorithm.prompts_per_step=4",
    "algorithm.kl_coef=0.05",
    "optimizer.average_decay=0.5",
    "algorithm.mini_batches=2",
    "algorithm.reference_refresh=3",
    "optimizer.warmup_steps=60",
    f"run.steps={STEPS}",
    "run.save_every=1",
    "run.eval_every=7",
    "run.tensorboard=false",
]
SLICED = [
    *OVERRIDES,
    "rollout.slice_tokens=3",
    "rollout.in_flight=6",
    "rollout.reserve=3",
    "rollout.stop=['=','7','8']",  # a random model hardly ever ends its completions: with these their lengths vary
    "algorithm.correction=truncate",
]


@dataclass
class Killed:
    """A run that was killed again and again, and what was seen at its kills."""

    path: Path
    in_a_save: int = 0
    ends: list[Ended] = field(default_factory=list)
    last: Ended | None = None


@pytest.fixture(
    scope="module", params=[(OVERRIDES, 0), (SLICED, 0), (SLICED, 2)], ids=["whole completions", "slices", "2 ranks"]
)
def kind(request: pytest.FixtureRequest) -> tuple[list[str], int]:
    """Overrides, and the number of ranks; 0 for one without torchrun."""
    return request.param


@pytest.fixture(scope="module")
def peaceful(kind: tuple[list[str], int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run nobody touches."""
    overrides, ranks = kind
    root = tmp_path_factory.mktemp("kills")
    ended = Job(root, [*overrides, "run.name=peaceful"], ranks).finish()
    assert ended.code == 0, ended
    return root / "runs" / "peaceful"


@pytest.fixture(scope="module")
def killed(kind: tuple[list[str], int], peaceful: Path) -> Killed:
    """The same run, killed at twenty moments and then left to finish."""
    chance = random.Random(20)
    told = Killed(peaceful.with_name("killed"))
    overrides, ranks = [*kind[0], "run.name=killed"], kind[1]
    root = peaceful.parents[1]
    for number in range(KILLS):
        before = seen(told.path)
        job = Job(root, overrides, ranks, cold=True)
        wait_for_a_moment(chance, number, told.path, before, job)
        job.kill_group()  # torchrun has a session for each rank
        job.kill()
        told.ends.append(job.finish())
        told.in_a_save += bool(list((told.path / "checkpoints").glob(".step-*.tmp")))
    told.last = Job(root, overrides, ranks).finish()
    return told


def wait_for_a_moment(chance: random.Random, number: int, path: Path, before: Any, job: Job) -> None:
    """Waits for some number of changes in the run directory, the first of them being the start; then a little more.

    A step changes it about ten times, most of them while it is saved. Every fifth kill falls into the start.
    """
    start = number % 5 == 0
    for _ in range(1 if start else chance.randint(2, 14)):
        wait_until(lambda now=before: seen(path) != now or job.process.poll() is not None, "no change", pause=0.001)
        before = seen(path)
    time.sleep(chance.uniform(0, 1.0 if start else 0.05))


def seen(path: Path) -> tuple[Any, ...]:
    """What changes while a run starts, steps and saves."""
    config, metrics = path / "config.yaml", path / "metrics.jsonl"
    return (
        config.stat().st_mtime_ns if config.exists() else None,
        metrics.stat().st_size if metrics.exists() else None,
        [(folder, sorted(files)) for folder, _, files in os.walk(path / "checkpoints")],
    )


def test_every_start_but_the_last_was_killed_and_some_in_a_save(killed):
    assert [ended.code for ended in killed.ends] == [-9] * KILLS, killed.ends
    assert killed.in_a_save >= 1
    assert killed.last.code == 0, killed.last
    assert not any(ended.orphans for ended in killed.ends)


def test_final_checkpoint_is_bit_for_bit_that_of_the_run_without_kills(killed, peaceful):
    last = f"checkpoints/step-{STEPS:06d}"
    assert saved(killed.path / last) == saved(peaceful / last)


def test_no_line_of_metrics_is_missing_double_or_different(killed, peaceful):
    assert [line["step"] for line in numbers(peaceful)] == [*range(1, STEPS + 1)]
    assert all(line["policy/grad_norm"] > 0 for line in numbers(peaceful))
    assert all(line.get("rollout/in_flight", 1) > 0 for line in numbers(peaceful))
    assert numbers(killed.path) == numbers(peaceful)
    assert held_out(killed.path) == held_out(peaceful)


def test_samples_and_summary_are_those_of_the_run_without_kills(killed, peaceful):
    assert contents(killed.path / "samples") == contents(peaceful / "samples")
    assert without_seconds(killed.path / "summary.json") == without_seconds(peaceful / "summary.json")


def test_nothing_half_written_is_left(killed, peaceful):
    assert half_written(killed.path) == []
    names = [sorted(p.name for p in (path / "checkpoints").iterdir()) for path in (killed.path, peaceful)]
    assert names[0] == names[1] == [f"step-{step:06d}" for step in (STEPS - 1, STEPS)]
