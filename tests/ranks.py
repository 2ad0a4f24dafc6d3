"""Starts real multi-process jobs for tests: torchrun's environment, one Python per rank, no orphan left behind."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
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
    environments = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
    with TemporaryDirectory() as folder:
        files = [Path(folder, f"rank-{rank}") for rank in range(world_size)]
        codes = _run(script, arguments, environments, files, limit(timeout))
        outputs = [file.read_text(errors="replace") for file in files]
    for number, (code, output) in enumerate(zip(codes, outputs, strict=True)):
        assert code is not None, f"rank {number} had not ended after {limit(timeout):.0f} s:\n{output[-4000:]}"
        assert code == 0, f"rank {number} exited with {code}:\n{output[-4000:]}"
    return outputs


def _run(
    script: Path, arguments: list[str], environments: list[dict[str, str]], outputs: list[Path], seconds: float
) -> list[int | None]:
    """The exit codes of ranks; None of those that had to be ended."""
    for output in outputs:
        output.touch()
    deadline = time.monotonic() + seconds
    forks = FORKS if next(CALLS) % 2 else FORKS[::-1]
    shares = {fork: slice(number, None, len(forks)) for number, fork in enumerate(forks[: len(outputs)])}
    pids = {
        fork: fork.start(str(script), arguments, environments[share], [str(output) for output in outputs[share]])
        for fork, share in shares.items()
    }
    codes: list[int | None] = [None] * len(outputs)
    try:
        for fork, share in shares.items():
            codes[share] = fork.wait(pids[fork], deadline)
    except BaseException:
        for fork, ranks in pids.items():
            fork.end(ranks)
        raise
    return codes


class Forks:
    """A process that has imported torch, whose forks are ranks (forked_ranks.py).

    It starts when it is first asked, and ends with this one, whose pipe it reads.

    Its forks order sets of texts alike, as processes that are started do not. There are two of them, for even and odd
    ranks, so that a job whose ranks depend on that order does not pass.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(
        self, script: str, arguments: list[str], environments: list[dict[str, str]], outputs: list[str]
    ) -> list[int]:
        """Starts ranks, and returns their process ids."""
        if self._process is None or self._process.poll() is not None:
            program = [sys.executable, str(REPOSITORY / "tests" / "forked_ranks.py")]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                program, 0, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )  # unbuffered: what has been read ahead, `select` does not know
        assert self._process.stdin is not None
        asked = {"script": script, "arguments": arguments, "folder": os.getcwd()}
        asked |= {"environments": environments, "outputs": outputs}
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        return self._answer()

    def wait(self, ranks: list[int], deadline: float) -> list[int | None]:
        """The exit codes of the ranks that it was asked for last; those that are there after the deadline are ended."""
        assert self._process is not None
        in_time, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        if in_time:
            return self._answer()
        _kill(ranks)
        return [None if code == -signal.SIGKILL else code for code in self._answer()]

    def end(self, ranks: list[int]) -> None:
        """Ends the ranks, and the process that waits for them."""
        _kill(ranks)
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> list[Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


FORKS = (Forks(), Forks())
CALLS = itertools.count()
"""Every job begins with the other one, so that a run that goes on has another order, too."""


def _kill(ranks: list[int]) -> None:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank, signal.SIGKILL)


def results(outputs: list[str]) -> Any:
    """The JSON document that rank 0 printed on its last line."""
    return json.loads(outputs[0].strip().splitlines()[-1])
