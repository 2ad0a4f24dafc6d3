"""Where a job listens: a lone process and the ranks of one machine on its loopback interface."""

from __future__ import annotations

import json
from pathlib import Path

from forks import run_python
from ranks import REPOSITORY, run_ranks

JOB = Path(__file__).with_name("ports_job.py")


def test_nobody_outside_can_connect_to_a_lone_process() -> None:
    made = run_python(JOB, paths=(REPOSITORY,))
    assert made.returncode == 0, made.stderr
    assert {*json.loads(made.stdout.splitlines()[-1])} <= {"127.0.0.1"}


def test_ranks_of_one_machine_exchange_over_loopback() -> None:
    """The store at which they meet, which the first rank opens here and torchrun otherwise, leaves no choice."""
    first, second = (json.loads(output.splitlines()[-1]) for output in run_ranks(JOB, 2, []))
    assert second
    assert {*second} == {"127.0.0.1"}
    assert sum(address != "127.0.0.1" for address in first) <= 1
