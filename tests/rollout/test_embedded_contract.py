"""The embedded engine keeps the contract of all engines: on one rank, two that share experts, two replicas of two."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_contract import CHECKS
from ranks import results, run_ranks

JOB = Path(__file__).with_name("engine_contract_job.py")


RANKS = {"single": 1, "ep2": 2, "tp2": 4}


@pytest.fixture(
    scope="module", params=["single", *(pytest.param(layout, marks=pytest.mark.long) for layout in ("ep2", "tp2"))]
)
def outcome(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, str]:
    folder, layout = tmp_path_factory.mktemp("contract"), request.param
    return results(run_ranks(JOB, RANKS[layout], [str(folder), f"layout={layout}", "model.context=64"]))


@pytest.mark.parametrize("check", CHECKS)
def test_contract(outcome: dict[str, str], check: str) -> None:
    assert not outcome[check], outcome[check]


def test_an_expert_that_is_not_the_trained_one_is_refused_by_name(outcome: dict[str, str]) -> None:
    assert not outcome["stale expert"], outcome["stale expert"]
