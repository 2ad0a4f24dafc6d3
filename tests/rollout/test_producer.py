"""Prompts become scored groups with a real engine: on one rank, on two that share experts, and on two replicas."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from ranks import results, run_ranks

JOB = Path(__file__).with_name("producer_job.py")
# By name: importing the job would prepare the platform here.
CHECKS = [
    node.name.removeprefix("check_")
    for node in ast.parse(JOB.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
]


@pytest.fixture(scope="module", params=["single", "ep2", "dp2"])
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, str]:
    ranks = 1 if request.param == "single" else 2
    return results(run_ranks(JOB, ranks, [str(tmp_path_factory.mktemp("producer")), f"layout={request.param}"]))


@pytest.mark.parametrize("check", CHECKS)
def test_producer(found: dict[str, str], check: str) -> None:
    assert not found[check], found[check]
