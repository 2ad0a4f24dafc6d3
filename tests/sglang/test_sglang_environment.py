"""An environment that answers the policy on real SGLang: calls end turns there, prefixes are read again, and an engine
that is killed in between loses nothing."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
from ranks import results, run_ranks

JOB = Path(__file__).with_name("grpo_job.py")


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["rollout.ahead=true", "algorithm.correction=truncate"],
        [
            "rollout.slice_tokens=5",
            "algorithm.correction=truncate",
            "environment.path=waiting_environments:WaitingCounter",
        ],
    ],
    ids=["in turn", "ahead", "slices of async calls"],
)
def test_calls_are_answered_and_an_engine_is_lost(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (JOB.parent, JOB.parents[1] / "environment"):
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    counter = ["environment.path=made_environments:Counter", "environment.open=''", "environment.close='='"]
    run = results(
        run_ranks(
            JOB,
            1,
            [str(tmp_path), "sglang", *counter, *more, "run.steps=5", "run.eval_every=0", "optimizer.lr=1e-6"],
            timeout=900,
        )
    )
    assert [step["step"] for step in run["metrics"]] == [*range(1, 6)]
    assert len([warning for warning in run["warnings"] if "died" in warning]) == 1
    # Of a step's 32 samples about eight make a call, by chance: SGLang draws others every time.
    assert fmean(step["environment/calls"] for step in run["metrics"]) > 0.1
    assert all(step["environment/errors"] == 0 for step in run["metrics"])
    # Far more than the prompts of a group: turns go on after what the engine still holds.
    assert all(step["rollout/cached"] > 0.25 for step in run["metrics"])
    assert all(step.get("mismatch/max_abs", 0.0) < 1e-4 for step in run["metrics"])
    assert more or all("mismatch/max_abs" in step for step in run["metrics"])
