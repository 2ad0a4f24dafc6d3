"""Weights reach a real SGLang engine over the network and through the disk, also when it dies on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import results, run_ranks

JOB = Path(__file__).with_name("transport_job.py")


@pytest.mark.parametrize(("transport", "checks"), [("network", 7), ("disk", 8)])
def test_transport(transport: str, checks: int, tmp_path: Path) -> None:
    found = results(run_ranks(JOB, 1, [str(tmp_path), transport], timeout=900))
    assert len(found) == checks
    for check, problem in found.items():
        assert not problem, f"{check}: {problem}"
