"""Prompts become scored answers with a real engine: on one rank, on two that share experts or layers, on replicas."""

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

LAYOUTS = [
    pytest.param(("single", 1), id="alone"),
    pytest.param(("ep2", 2), id="ep2", marks=pytest.mark.long),
    pytest.param(("single", 2), id="replicas", marks=pytest.mark.long),
    pytest.param(("tp2", 2), id="tp2", marks=pytest.mark.long),
]


@pytest.fixture(scope="module", params=LAYOUTS)
def outcome(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, str]:
    layout, ranks = request.param
    return results(run_ranks(JOB, ranks, [str(tmp_path_factory.mktemp("producer")), f"layout={layout}"]))


@pytest.mark.parametrize("check", CHECKS)
def test_producer(outcome: dict[str, str], check: str) -> None:
    assert not outcome[check], outcome[check]
