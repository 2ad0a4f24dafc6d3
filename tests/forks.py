"""Python programs for tests, started as forks of processes that have imported torch (forked_programs.py).

`run_ranks` (ranks.py) starts the ranks of a job this way, `run_python` a command that a user would type.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from limits import limit

REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Program:
    """`python WORDS` in a folder; standard output and standard error go to files, which are there."""

    words: list[str]
    folder: str
    environment: dict[str, str]
    output: str
    errors: str


def run_python(
    *words: object,
    folder: Path | None = None,
    paths: tuple[Path, ...] = (),
    environment: dict[str, str] | None = None,
    timeout: float = 600,
) -> subprocess.CompletedProcess[str]:
    """`python WORDS`, a script or -m and a module, within `limit(timeout)` seconds.

    It runs in `folder`, or else in the repository, with one thread; `paths`, or else the repository, are PYTHONPATH.

    Raises:
        subprocess.TimeoutExpired: It has not ended in time, and was ended.
    """
    own = {
        "PYTHONPATH": os.pathsep.join(map(str, paths or (REPOSITORY, REPOSITORY / "kernels"))),
        "OMP_NUM_THREADS": "1",
    }
    texts = [str(word) for word in words]
    with TemporaryDirectory() as place:
        files = [Path(place, name) for name in ("output", "errors")]
        for file in files:
            file.touch()
        program = Program(
            texts, str(folder or REPOSITORY), os.environ | own | (environment or {}), *[str(file) for file in files]
        )
        [code] = run([program], limit(timeout))
        output, errors = (file.read_text() for file in files)
    if code is None:
        raise subprocess.TimeoutExpired(texts, limit(timeout), output, errors)
    return subprocess.CompletedProcess(texts, code, output, errors)


def run(programs: list[Program], seconds: float) -> list[int | None]:
    """The exit codes of programs that run side by side; None of those that had to be ended."""
    deadline = time.monotonic() + seconds
    forks = FORKS if next(CALLS) % 2 else FORKS[::-1]
    shares = {fork: slice(number, None, len(forks)) for number, fork in enumerate(forks[: len(programs)])}
    pids = {fork: fork.start(programs[share]) for fork, share in shares.items()}
    codes: list[int | None] = [None] * len(programs)
    try:
        for fork, share in shares.items():
            codes[share] = fork.wait(pids[fork], deadline)
    except BaseException:
        for fork, own in pids.items():
            fork.end(own)
        raise
    return codes


class Forks:
    """A process that has imported torch, and forks.

    It starts when it is first asked, and ends with this one, whose pipe it reads.

    Its forks order sets of texts alike, as processes that are started do not. There are two of them, for even and odd
    ranks, so that a job whose ranks depend on that order does not pass.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, programs: list[Program]) -> list[int]:
        """Starts programs, and returns their process ids."""
        if self._process is None or self._process.poll() is not None:
            # -P, and no PYTHONPATH: what its forks import is theirs to say.
            server = [sys.executable, "-P", str(REPOSITORY / "tests" / "forked_programs.py")]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
            self._process = subprocess.Popen(
                server, 0, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )  # unbuffered: what has been read ahead, `select` does not know
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([asdict(program) for program in programs]).encode() + b"\n")
        return self._answer()

    def wait(self, pids: list[int], deadline: float) -> list[int | None]:
        """The exit codes of what it was asked for last; what has not ended at the deadline is ended."""
        assert self._process is not None
        in_time, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        if in_time:
            return self._answer()
        _kill(pids)
        return [None if code == -signal.SIGKILL else code for code in self._answer()]

    def end(self, pids: list[int]) -> None:
        """Ends programs, and the process that waits for them."""
        _kill(pids)
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> list[Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


FORKS = (Forks(), Forks())
CALLS = itertools.count()
"""Every call begins with the other one, so that a run that goes on has another order, too."""


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
