"""The plan of a step beside what was measured: the planner's own figures, for completions as long as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import results, run_ranks

SECONDS = {"generate": 30.0, "reward": 2.0, "logprobs": 9.0, "update": 20.0, "sync": 15.0, "step": 76.0}
SEVEN = ["experiment=deepseekmath_7b", "run.steps=20"]
LONG = ["rollout.longer_from_step=6", "rollout.longer_max_new_tokens=2048", "model.context=4096"]
KINDS = {"the first": ((2, 3), 0), "the last with the first limit": ((5, 6), 0), "the second limit": ((7, 9), 1)}
"""Steps, and which of the run's two kinds of steps they are: from the seventh on completions may be twice as long."""


def measured(
    steps: tuple[int, int], gpus: int, vocab_size: int, completion: float, peak: float | None
) -> dict[str, Any]:
    return {"steps": steps, "gpus": gpus, "vocab_size": vocab_size, "prompt": 99.6, "completion": completion} | {
        "signal": 1.0,
        "seconds": SECONDS,
        "peak": peak,
    }


CASES: dict[str, Any] = {
    name: [[*SEVEN, *LONG], measured(steps, 8, 102400, 300.0 * (1 + kind), 41e9)]
    for name, (steps, kind) in KINDS.items()
}
CASES |= {
    experiment: [[f"experiment={experiment}", "cluster=h100"], measured((2, 3), 4, 45, 10.0, None)]
    for experiment in ("tiny", "tiny_ppo")
}
CASES |= {str(gpus): [[*SEVEN, "cluster.nodes=1"], measured((2, 3), gpus, 102400, 300.0, None)] for gpus in (4, 8, 16)}
CASES["no GPU"] = [["experiment=tiny"], measured((2, 3), 1, 45, 10.0, None)]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return results(run_ranks(Path(__file__).with_name("compare_job.py"), 1, [json.dumps(CASES)]))


@pytest.mark.parametrize("name", KINDS)
def test_it_is_the_plan_for_completions_of_this_length(found: dict[str, Any], name: str) -> None:
    """And for the limit that these steps had."""
    compared, kind = found[name], KINDS[name][1]
    expected = compared["kinds"][kind]
    assert expected["completion"] == 300.0 * (1 + kind)
    by_name = {phase["name"]: phase["seconds"] for phase in expected["phases"]}
    assert {phase: pair[0] for phase, pair in compared["seconds"].items()} == {
        "generate": by_name["generation"],
        "logprobs": by_name["log-probs of the reference policy"],
        "update": by_name["updates"],
        "sync": by_name["weights to the engines"] + by_name["offload"],
        "reward": None,
        "step": pytest.approx(expected["seconds"]),
    }
    assert {phase: pair[1] for phase, pair in compared["seconds"].items()} == SECONDS
    assert compared["memory"] == [compared["trainer"], 41e9]
    assert compared["trainer"] < compared["total"] - 10e9
    assert (compared["gpu"], compared["gpus"]) == ("h100", 8)


@pytest.mark.parametrize("experiment", ["tiny_ppo", "tiny"])
def test_all_that_is_planned_belongs_to_a_phase_of_the_timer(found: dict[str, Any], experiment: str) -> None:
    seconds = found[experiment]["seconds"]
    of_phases = [planned for phase, (planned, _) in seconds.items() if phase != "step" and planned is not None]
    assert sum(of_phases) == pytest.approx(seconds["step"][0])
    assert ("values" in seconds) == (experiment == "tiny_ppo")


def test_gpus_are_those_that_the_run_has(found: dict[str, Any]) -> None:
    """Whatever `cluster.nodes` says: the job may have begun with others."""
    four, eight, sixteen = (found[gpus] for gpus in ("4", "8", "16"))
    assert sixteen["seconds"]["update"][0] < eight["seconds"]["update"][0] < four["seconds"]["update"][0]
    assert sixteen["memory"][0] < eight["memory"][0]


def test_without_a_gpu_nothing_can_be_compared(found: dict[str, Any]) -> None:
    assert found["no GPU"]["error"].startswith("cluster.gpu=null: ")
