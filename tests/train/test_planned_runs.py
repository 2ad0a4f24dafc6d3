"""A run whose GPUs the planner knows says, after three steps, what it took beside what was planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from train_jobs import SMALL, Job, rewarded_by

from grpo_mega.observe.metrics import read_metrics
from grpo_mega.show.report.pack import pack
from grpo_mega.show.report.read import read_run

pytestmark = pytest.mark.long
OWN = ["layout=single", "run.steps=5", "run.eval_every=2", "algorithm.mini_batches=2", rewarded_by("varied")]


def said(stderr: str) -> list[str]:
    return " ".join(stderr.split()).split("seconds of steps ")[1:]


def test_planned_seconds_stand_beside_the_measured_ones(tmp_path: Path) -> None:
    """Those of steps 3 and 5: the first starts libraries, the second and the fourth are followed by an evaluation."""
    ended = Job(tmp_path, [*SMALL, *OWN, "run.name=known", "cluster.gpu=h100"]).finish()
    assert (ended.code, ended.orphans) == (0, []), ended
    run = tmp_path / "runs" / "known"
    [line] = said(ended.stderr)
    assert line.startswith("3 and 5 as measured (as planned for 1 H100): generate ")
    compared = json.loads((run / "planned.json").read_text())
    assert json.loads((run / "summary.json").read_text())["planned"] == compared
    metrics = read_metrics(run / "metrics.jsonl")
    own = {record["step"]: record for record in metrics if record["step"] in (3, 5) and "time/step" in record}
    for phase, (planned, measured) in compared["seconds"].items():
        assert measured == pytest.approx(sum(own[step].get(f"time/{phase}", 0.0) for step in (3, 5)) / 2)
        assert (planned is not None) == (phase in ("generate", "logprobs", "update", "step")), phase
    assert compared["answer"] == pytest.approx(sum(own[step]["rollout/length_mean"] for step in (3, 5)) / 2)
    assert compared["memory"][1] is None, "resident memory is not what is planned"
    assert (run / "logs" / "planned.log").read_text() == ""
    packed: Any = pack([read_run(run)])
    assert packed["runs"][0]["planned"]["rows"][-1][0] == "step"


def test_nothing_is_planned_without_a_gpu_that_the_planner_knows(tmp_path: Path) -> None:
    ended = Job(tmp_path, [*SMALL, *OWN, "run.name=unknown"]).finish()
    assert ended.code == 0, ended
    assert said(ended.stderr) == []
    assert not (tmp_path / "runs" / "unknown" / "planned.json").exists()
