"""The common clock: machines whose clocks differ by years agree, within the error that is told."""

from __future__ import annotations

import json
from pathlib import Path

from ranks import run_ranks

JOB = Path(__file__).with_name("clock_job.py")


def test_clocks_of_other_machines_agree_within_their_error() -> None:
    outputs = run_ranks(JOB, 3, [str(10**17), "2"])
    (first, nothing), (second, none), (other, error) = (json.loads(output) for output in outputs)
    assert nothing == none == 0.0, "on the main rank's machine"
    assert abs(second - first) < 1.0
    assert 0.0 < error < 1e6
    assert abs(other - first) <= error + 1.0
