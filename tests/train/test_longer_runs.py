"""A run that ends with a decay is continued with more steps from before it: bit for bit the longer run, or an error."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from train_jobs import SMALL, Ended, Job, numbers, rewarded_by, saved

pytestmark = pytest.mark.long

OVERRIDES = [
    *SMALL,
    "layout=single",
    rewarded_by("varied"),
    "algorithm.mini_batches=2",
    "optimizer.warmup_steps=1",
    "optimizer.schedule=wsd",
    "optimizer.decay_steps=2",
    "run.save_every=1",
    "run.keep_checkpoints=9",
]


def train(root: Path, name: str, steps: int) -> Ended:
    return Job(root, [*OVERRIDES, f"run.name={name}", f"run.steps={steps}"]).finish()


def test_more_steps_move_a_decay_that_has_not_begun_and_no_other(tmp_path: Path) -> None:
    assert train(tmp_path, "at-once", 4).code == 0
    assert train(tmp_path, "in-parts", 3).code == 0
    at_once, in_parts = (tmp_path / "runs" / name for name in ("at-once", "in-parts"))
    assert [line["policy/lr"] for line in numbers(in_parts)] == [3e-4, 3e-4, 1.5e-4]

    refused = train(tmp_path, "in-parts", 4)
    assert refused.code == 2
    assert "run.steps=4: moves the decay of optimizer.schedule=wsd" in refused.stderr
    assert "step 3 was trained at 0.5 of optimizer.lr, and would now be at 1" in refused.stderr

    shutil.rmtree(in_parts / "checkpoints" / "step-000003")
    assert train(tmp_path, "in-parts", 4).code == 0
    assert numbers(in_parts) == numbers(at_once)
    assert saved(in_parts / "checkpoints" / "step-000004") == saved(at_once / "checkpoints" / "step-000004")
