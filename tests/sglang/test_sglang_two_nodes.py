"""An engine that spans two nodes: both ranks of this machine believe that they are alone on theirs."""

from __future__ import annotations

from pathlib import Path

from ranks import results, run_ranks

JOB = Path(__file__).with_name("two_nodes_job.py")


def test_an_engine_over_two_nodes(tmp_path: Path) -> None:
    """It gets the weights, samples with them, and is started anew on both when the second node's part is lost."""
    found = results(run_ranks(JOB, 2, [str(tmp_path)], timeout=600))
    assert found["first"] < 1e-4
    assert "the SGLang engine of ranks 0 to 1" in found["lost"]
    assert found["then"] < 1e-4
    hosted, left = zip(*found["processes"], strict=True)
    assert all(hosted), "one of the nodes hosts nothing"
    assert left == (0, 0)
    assert sorted(file.name for file in (tmp_path / "logs").iterdir()) == ["engine-0-node-1.log", "engine-0.log"]
