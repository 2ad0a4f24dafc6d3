"""A job that leaves a layout has none of its process groups left."""

from __future__ import annotations

import json
from pathlib import Path

from ranks import run_ranks


def test_the_threads_of_a_layout_end_when_the_job_leaves_it() -> None:
    for output in run_ranks(Path(__file__).with_name("topology_job.py"), 2, []):
        first, *others = json.loads(output.splitlines()[-1])
        assert max(others) <= first
