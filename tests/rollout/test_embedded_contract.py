"""The embedded engine keeps the contract of all engines, on one rank and on two that share the experts."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_contract import CHECKS
from ranks import results, run_ranks

JOB = Path(__file__).with_name("engine_contract_job.py")


@pytest.fixture(scope="module", params=["single", "ep2"])
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, str]:
    folder, ranks = tmp_path_factory.mktemp("contract"), 2 if request.param == "ep2" else 1
    return results(run_ranks(JOB, ranks, [str(folder), f"layout={request.param}"]))


@pytest.mark.parametrize("check", CHECKS)
def test_contract(found: dict[str, str], check: str) -> None:
    assert not found[check], found[check]


def test_an_expert_that_is_not_the_trained_one_is_refused_by_name(found: dict[str, str]) -> None:
    assert not found["stale expert"], found["stale expert"]
