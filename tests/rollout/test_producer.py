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


@pytest.fixture(scope="module", params=[("single", 1), ("ep2", 2), ("single", 2)], ids=["alone", "ep2", "replicas"])
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, str]:
    layout, ranks = request.param
    return results(run_ranks(JOB, ranks, [str(tmp_path_factory.mktemp("producer")), f"layout={layout}"]))


@pytest.mark.parametrize("check", CHECKS)
def test_producer(found: dict[str, str], check: str) -> None:
    assert not found[check], found[check]
