"""How long ranks wait for each other is a setting, and all process groups have it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from composed import composed
from ranks import run_ranks

from grpo_mega.platform.collectives import PATIENCE


@pytest.mark.parametrize(("overrides", "seconds"), [([], "1800.0"), (["cluster.timeout_seconds=4321"], "4321.0")])
def test_every_process_group_of_a_run_waits_as_long(overrides: list[str], seconds: str, tmp_path: Path) -> None:
    (output,) = run_ranks(Path(__file__).with_name("timeouts_job.py"), 1, [str(tmp_path), *overrides])
    found = json.loads(output.strip().splitlines()[-1])
    # Beside them the group over which ranks wait for files, as long as it takes.
    assert found["seconds"].pop(str(PATIENCE.total_seconds())) == 1
    assert found["seconds"].keys() == {seconds}, found
    assert found["seconds"][seconds] > 10


def test_the_largest_preset_waits_for_its_checkpoints() -> None:
    """10.9 TB: at 3 GB/s an hour, and ranks with less to do wait for those with more."""
    for name in ("r1zero_671b", "r1zero_671b_h200"):
        assert composed(f"experiment={name}").cluster.timeout_seconds >= 3600
