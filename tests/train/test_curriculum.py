"""A curriculum over two sources: what steps earned decides, and a run that continues takes the same prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from train_jobs import SMALL, Job, rewarded_by

pytestmark = pytest.mark.long


def files(root: Path) -> list[str]:
    words = ["base=none", "data=jsonl", "data.curriculum=frontier", "data.validation_size=2", "data.frontier_low=0.3"]
    for name, first, weight in (("small", 0, 3), ("large", 3, 1)):
        rows = [{"prompt": f"{i}+{k}=?", "answer": i + k} for i in range(first, first + 3) for k in range(4)]
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        words += [f"data.sources.{name}.path={root}/{name}.jsonl", f"data.sources.{name}.weight={weight}"]
    return words


def trained(root: Path, name: str, steps: int, ranks: int) -> list[str]:
    """Trains up to so many steps; returns the prompts' names, in order."""
    words = [*SMALL, *files(root), rewarded_by("varied"), "reward.success=own", "data.test_size=2"]
    words += [f"run.name={name}", f"run.steps={steps}", "run.eval_every=0", "run.sample_groups_per_step=8"]
    ended = Job(root, words, ranks).finish()
    assert ended.code == 0, ended
    folder = root / "runs" / name / "samples"
    lines = [line for file in sorted(folder.glob("step-*")) for line in file.read_text().splitlines()]
    return [json.loads(line)["prompt_id"] for line in lines]


def state(run: Path, step: int) -> dict[str, Any]:
    saved = json.loads((run / "checkpoints" / f"step-{step:06d}" / "state.json").read_text())
    return saved["stage"]["prompts"]


def test_a_run_that_continues_has_the_prompts_of_one_that_did_not_stop(tmp_path: Path) -> None:
    whole = trained(tmp_path, "whole", 5, 2)
    trained(tmp_path, "cut", 2, 2)
    assert trained(tmp_path, "cut", 5, 2) == whole
    one, other = (state(tmp_path / "runs" / name, 5) for name in ("whole", "cut"))
    assert one == other
    rates = [rate for of_it in one["rates"] for rate in of_it if rate is not None]
    assert len(rates) > 15
    assert len({*rates}) > 2
    assert sum(one["positions"]) > 40  # some were left out


def test_a_curriculum_that_cannot_know_a_tasks_pass_rate_is_refused(tmp_path: Path) -> None:
    words = ["experiment=tiny_mixture", "layout=single", "data.train_size=8", "data.curriculum=frontier"]
    ended = Job(tmp_path, [*words, "data.frontier_terms=[]"]).finish()
    assert ended.code == 2
    assert "its task 'tiny_code' has no term among reward.success (accuracy)" in ended.stderr
