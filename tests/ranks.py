"""Starts real multi-process jobs for tests: torchrun's environment, one Python per rank, no orphan left behind."""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

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
    for number, (code, output) in enumerate(zip(codes, outputs, strict=True)):
        assert code is not None, f"rank {number} had not ended after {limit(timeout):.0f} s:\n{output[-4000:]}"
        assert code == 0, f"rank {number} exited with {code}:\n{output[-4000:]}"
    return outputs


def results(outputs: list[str]) -> Any:
    """The JSON document that rank 0 printed on its last line."""
    return json.loads(outputs[0].strip().splitlines()[-1])
