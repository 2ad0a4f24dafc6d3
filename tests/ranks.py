"""Starts real multi-process jobs for tests: torchrun's environment, one Python per rank, no orphan left behind."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from limits import limit

REPOSITORY = Path(__file__).resolve().parents[1]


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
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [rank.communicate(timeout=limit(timeout))[0] for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()
    for number, (rank, output) in enumerate(zip(ranks, outputs, strict=True)):
        assert rank.returncode == 0, f"rank {number} exited with {rank.returncode}:\n{output[-4000:]}"
    return outputs


def results(outputs: list[str]) -> Any:
    """The JSON document that rank 0 printed on its last line."""
    return json.loads(outputs[0].strip().splitlines()[-1])
