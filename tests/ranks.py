"""Starts real multi-process jobs for tests: torchrun's environment, one Python per rank, no orphan left behind."""

from __future__ import annotations

import json
import os
import random
import socket
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from forks import REPOSITORY, Program, run
from limits import limit

_claims: list[socket.socket] = []


def free_port() -> int:
    """A free TCP port, outside the range from which the system assigns ports.

    No other caller gets it while this process lives: jobs begin to listen seconds later, and tests run side by side.
    """
    for port in random.sample(range(10_000, 20_000), 1000):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0grpo_mega test port {port}")  # one process on this machine can have this name
            with socket.create_server(("", port)):
                _claims.append(claim)
                return port
        except OSError:
            claim.close()
    raise OSError("no port is free between 10000 and 20000")


def run_ranks(script: Path, world_size: int, arguments: list[str], timeout: float = 900) -> list[str]:
    """Runs `script` on `world_size` ranks and returns the output of each, within `limit(timeout)` seconds.

    Raises:
        AssertionError: A rank failed or the job hung; has the output of the ranks. All ranks are ended.
    """
    before = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    common = os.environ | {
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (*before, REPOSITORY, REPOSITORY / "kernels", REPOSITORY / "tests"))),
    }
    environments = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
    with TemporaryDirectory() as folder:
        files = [Path(folder, f"rank-{rank}") for rank in range(world_size)]
        programs = []
        for file, environment in zip(files, environments, strict=True):
            file.touch()
            programs.append(Program([str(script), *arguments], os.getcwd(), environment, str(file), str(file)))
        codes = run(programs, limit(timeout))
        outputs = [file.read_text(errors="replace") for file in files]
    for number, (code, output) in enumerate(zip(codes, outputs, strict=True)):
        assert code is not None, f"rank {number} had not ended after {limit(timeout):.0f} s:\n{output[-4000:]}"
        assert code == 0, f"rank {number} exited with {code}:\n{output[-4000:]}"
    return outputs


def results(outputs: list[str]) -> Any:
    """The JSON document that rank 0 printed on its last line."""
    return json.loads(outputs[0].strip().splitlines()[-1])
