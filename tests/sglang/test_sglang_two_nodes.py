"""Engines on two nodes: both ranks of this machine believe that they are alone on theirs."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import results, run_ranks

JOB = Path(__file__).with_name("two_nodes_job.py")


ONE = ("the SGLang engine of ranks 0 to 1", ["engine-0-node-1.log", "engine-0.log"])
TWO = ("the SGLang engine of rank 1 died", ["engine-0.log", "engine-1.log"])
TOGETHER = ("the SGLang engine of rank 1 did not answer start within 0.1 s", TWO[1])
DATA_PARALLEL_ATTENTION = [
    "+rollout.sglang.arguments={enable_dp_attention: true, dp_size: 2, ep_size: 2}",
    "layout=ep2",
]


@pytest.mark.parametrize(
    ("engines", "overrides", "expected"),
    [
        ("both", [], ONE),
        ("both", DATA_PARALLEL_ATTENTION, ONE),
        ("each", [], TWO),
        ("together", ["rollout.sglang.transport=network"], TOGETHER),
    ],
    ids=["both", "both, data parallel attention", "each", "together"],
)
def test_engines_on_two_nodes(tmp_path: Path, engines: str, overrides: list[str], expected: tuple) -> None:
    """They get the weights, sample with them, are interrupted by one rank, and go on when what the second node hosts is
    lost: one engine over both while it generates, one of two between two pushes, or two at once, one of them again."""
    lost, logs = expected
    found = results(run_ranks(JOB, 2, [str(tmp_path), engines, *overrides], timeout=600))
    assert found["first"] < 1e-4
    assert abs(found["missed"]) < 0.01
    assert not found["interrupted"], found["interrupted"]
    assert lost in found["lost"]
    assert found["then"] < 1e-4
    hosted, left = zip(*found["processes"], strict=True)
    assert all(hosted), "one of the nodes hosts nothing"
    assert left == (0, 0)
    assert sorted(file.name for file in (tmp_path / "logs").iterdir()) == logs
