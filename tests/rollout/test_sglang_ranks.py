"""Collectives of ranks that share engines."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import results, run_ranks

JOB = Path(__file__).with_name("sglang_ranks_job.py")


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_each_rank_gets_what_the_owner_of_its_engine_scatters(tp: int) -> None:
    for rank, result in enumerate(results(run_ranks(JOB, 4, [str(tp)]))):
        text = f"{rank // tp * tp} to {rank}"
        assert result == {"scattered": [text, "", text * 10**5], "sums": [6, 1, 0]}
