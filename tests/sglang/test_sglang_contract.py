"""A real SGLang engine keeps the contract of all engines, survives its death, and leaves nothing behind."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from engine_contract import CHECKS
from ranks import results, run_ranks

JOB = Path(__file__).with_name("sglang_contract_job.py")
# By name: importing the job would prepare the platform here.
OWN = [
    node.name.removeprefix("check_")
    for node in ast.parse(JOB.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return results(run_ranks(JOB, 1, [str(tmp_path_factory.mktemp("contract"))], timeout=900))


@pytest.mark.parametrize("check", [*CHECKS, *OWN])
def test_contract(found: dict[str, str], check: str) -> None:
    assert not found[check], found[check]
