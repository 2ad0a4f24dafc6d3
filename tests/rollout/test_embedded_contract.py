"""The embedded engine keeps the contract of all engines."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_contract import CHECKS
from ranks import results, run_ranks

JOB = Path(__file__).with_name("engine_contract_job.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return results(run_ranks(JOB, 1, [str(tmp_path_factory.mktemp("contract"))]))


@pytest.mark.parametrize("check", CHECKS)
def test_contract(found: dict[str, str], check: str) -> None:
    assert not found[check], found[check]


def test_an_expert_that_is_not_the_trained_one_is_refused_by_name(found: dict[str, str]) -> None:
    assert not found["stale expert"], found["stale expert"]
