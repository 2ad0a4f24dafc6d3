"""Turns of trainer and engine on two ranks end where they began, or leave a post-mortem and an error that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import results, run_ranks

JOB = Path(__file__).with_name("colocation_job.py")
RANKS = (0, 1)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found in each case."""
    outputs = run_ranks(JOB, len(RANKS), [str(tmp_path_factory.mktemp("colocation"))])
    return [json.loads(output.strip().splitlines()[-1]) for output in outputs]


@pytest.fixture(params=RANKS)
def cases(request: pytest.FixtureRequest, found: list[dict[str, Any]]) -> dict[str, Any]:
    return found[request.param]


def test_a_turn_that_ends_well_leaves_nothing(cases: dict[str, Any]) -> None:
    case = cases["well"]
    assert (case["state"], case["version"], case["error"], case["written"]) == ("training", 2, "", None)
    assert case["bytes"] > 0


def test_an_interruption_is_no_failure(cases: dict[str, Any]) -> None:
    case = cases["interrupted"]
    assert (case["state"], case["error"], case["written"]) == ("training", "Interrupted: ", None)


@pytest.mark.parametrize(
    ("name", "error", "state"),
    [
        ("refused", "EngineError: end_update: version 4 is stale", "engine_loading"),
        ("slow_push", "LeaseTimeout: the device is engine loading", "engine_loading"),
        ("slow_return", "LeaseTimeout: the device is trainer acquiring", "trainer_acquiring"),
        ("failing", "MemoryError: no room", "generating"),
    ],
)
def test_a_turn_that_fails_leaves_a_post_mortem(cases: dict[str, Any], name: str, error: str, state: str) -> None:
    case = cases[name]
    assert case["error"].startswith(error)
    assert case["notes"] == [f"whose turn it was, and who held how much memory: {case['file']}"]
    written = case["written"]
    assert case["error"].splitlines()[0] in written["error"]
    assert "Traceback" in written["error"]
    assert written["state"] == state
    assert written["transitions"][-1]["after"] == state
    assert written["timeouts"].keys() >= {"engine_loading", "trainer_acquiring"}
    header, *lines = written["memory"]
    assert header.split() == ["MiB", "trainer", "engine"]
    assert lines[0].startswith("trainer's turn ends")


def test_after_an_engine_failed_it_is_the_trainers_turn(cases: dict[str, Any]) -> None:
    assert cases["refused"]["state"] == "training"


def test_a_push_that_lasts_too_long_is_ended_before_it_is_over(cases: dict[str, Any]) -> None:
    """Its session is still open."""
    assert cases["slow_push"]["version"] is None
    assert "rollout.sglang.timeouts.engine_loading allows 1e-09 s" in cases["slow_push"]["error"]


def test_a_post_mortem_that_cannot_be_written_hides_no_error(cases: dict[str, Any]) -> None:
    case = cases["nowhere_to_write"]
    assert case["error"].startswith("LeaseTimeout: ")
    (note,) = case["notes"]
    assert note.startswith("its post-mortem could not be written: ")
    assert case["written"] is None


def test_every_model_of_a_run_leaves_the_device(tmp_path: Path) -> None:
    """Whatever roles a run has; one that stayed would take the memory of the engine's cache."""
    found = results(run_ranks(JOB.with_name("assembled_job.py"), 1, [str(tmp_path)]))
    assert all(leaving == of_run for of_run, leaving in found.values())
    roles = {role for of_run, _ in found.values() for role in of_run}
    assert roles == {"policy", "reference", "critic", "teacher", "reward model"}
