"""Completions reach all ranks as they were."""

from __future__ import annotations

from pathlib import Path

from ranks import results, run_ranks

JOB = Path(__file__).with_name("completions_job.py")


def test_every_rank_gets_what_all_of_them_had() -> None:
    assert results(run_ranks(JOB, 3, [])) == [[], [], []]
