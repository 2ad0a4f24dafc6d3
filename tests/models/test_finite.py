"""A gradient that is not finite on one rank ends the update on all of them, before any weight has changed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks

CASES = ("dp2", "dp2zero", "dp2overlap", "tp2", "pp2", "ep2zero", "cp2", "predictor", "overflow")


@pytest.fixture(scope="module")
def outcome() -> list[dict[str, Any]]:
    """The outcome on each of two ranks; the second one's gradient was broken."""
    outputs = run_ranks(Path(__file__).with_name("finite_job.py"), 2, [*CASES])
    return [json.loads(output.strip().splitlines()[-1]) for output in outputs]


@pytest.mark.parametrize("case", CASES)
def test_it_is_an_error_on_every_rank_that_names_the_parameter(case: str, outcome: list[dict[str, Any]]) -> None:
    broken = outcome[1][case]["name"]
    for rank in outcome:
        assert rank[case]["message"].startswith("the gradient is not finite, or too large for its norm: ")
        assert f"{broken} (up to " in rank[case]["message"]
        assert "No weight was changed" in rank[case]["message"]


def test_it_names_ranks(outcome: list[dict[str, Any]]) -> None:
    """Where a gradient is not shared, the rank that has it; the other one's are fine and not named."""
    assert "linear_fc2.weight (up to nan, rank 1)" in outcome[0]["pp2"]["message"]
    assert "local_experts.1.linear_fc1.weight (up to nan, rank 1)" in outcome[0]["ep2zero"]["message"]
    assert "rank 0)" not in outcome[0]["ep2zero"]["message"]


@pytest.mark.parametrize("case", CASES)
def test_weights_and_optimizer_are_as_before(case: str, outcome: list[dict[str, Any]]) -> None:
    for rank in outcome:
        assert rank[case]["changed"] == 0
        assert rank[case]["kept"] > 10


@pytest.mark.parametrize("case", CASES)
def test_the_next_update_knows_nothing_of_it(case: str, outcome: list[dict[str, Any]]) -> None:
    for rank in outcome:
        assert math.isfinite(rank[case]["after"])
        assert rank[case]["after"] > 0
        assert rank[case]["moved"] == rank[case]["kept"]
