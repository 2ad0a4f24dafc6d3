"""Starts real multi-process jobs for tests: torchrun's environment, one Python per rank, no orphan left behind."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from forks import REPOSITORY, Program, start, wait_for
from limits import limit


def run_ranks(
    script: Path, world_size: int, arguments: list[str], timeout: float = 900, cold: bool = False
) -> list[str]:
    """Runs `script` on `world_size` ranks and returns the output of each, within `limit(timeout)` seconds.

    Ranks are forks that have imported the product, unless they are to be `cold`.

    Raises:
        AssertionError: A rank failed or the job hung; has the output of the ranks. All ranks are ended.
    """
    before = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    paths = map(str, (*before, REPOSITORY, REPOSITORY / "kernels", REPOSITORY / "tests"))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    with TemporaryDirectory() as folder:
        file = f"{folder}/rank-{{rank}}"
        program = Program([str(script), *arguments], os.getcwd(), environment, file, file, cold)
        codes = wait_for(start(program, world_size), limit(timeout))
        outputs = [Path(file.replace("{rank}", str(rank))).read_text(errors="replace") for rank in range(world_size)]
    # Who was ended because another rank failed says nothing of the cause.
    for number in sorted(range(world_size), key=lambda rank: codes[rank] == -signal.SIGTERM):
        code, output = codes[number], outputs[number]
        assert code is not None, f"rank {number} had not ended after {limit(timeout):.0f} s:\n{output[-4000:]}"
        assert code == 0, f"rank {number} exited with {code}:\n{output[-4000:]}"
    return outputs


def words_of_long(request: pytest.FixtureRequest) -> list[str]:
    """["all"] if long tests of the fixture's file run, too: what they alone look at takes a job longer."""
    here = (item for item in request.session.items if item.path == request.path)
    return ["all"] if any(item.get_closest_marker("long") for item in here) else []


def results(outputs: list[str]) -> Any:
    """The JSON document that rank 0 printed on its last line."""
    return json.loads(outputs[0].strip().splitlines()[-1])
