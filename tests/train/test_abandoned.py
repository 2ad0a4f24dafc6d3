"""kill -9 of one part of a run leaves no other part behind: what has lost its purpose ends by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from train_jobs import SMALL, Job, rewarded_by

ENDLESS = [
    *(override for override in SMALL if not override.startswith("base.")),
    "base=none",
    rewarded_by("varied"),
    "run.steps=100000",
    "run.save_every=1",
    "run.async_save=true",
    "run.eval_every=0",
    "run.tensorboard=false",
]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """A run of two ranks that has saved, and goes on saving."""
    job = Job(tmp_path, [*ENDLESS, "run.name=endless"], ranks=2, cold=True)
    try:
        job.wait_until_there(tmp_path / "runs" / "endless" / "checkpoints" / "step-000002")
        yield job
    finally:
        job.kill()


def torchrun(job: Job) -> psutil.Process:
    return psutil.Process(job.process.pid)


def a_rank(job: Job) -> psutil.Process:
    return max(torchrun(job).children(), key=lambda rank: rank.environ()["RANK"])


@pytest.mark.long  # tests/platform/test_orphans.py has it in `make test`, without a run around it
@pytest.mark.parametrize("killed", [torchrun, a_rank])
def test_nothing_outlives_what_is_killed(job: Job, killed: Callable[[Job], psutil.Process]) -> None:
    assert {rank.environ()["RANK"] for rank in torchrun(job).children()} == {"0", "1"}
    killed(job).kill()
    ended = job.finish()  # which waits for 20 seconds until nothing of the job is left
    assert ended.code != 0
    assert ended.orphans == []
