"""Python programs for tests, started as forks of processes that have imported the product (forked_programs.py).

`run_ranks` (ranks.py) starts the ranks of a job this way, `run_python` a command that a user would type.
"""

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
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from limits import limit

REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Program:
    """`python WORDS` in a folder; standard output and standard error are added to files.

    A `cold` one has imported nothing when it starts: for tests of what imports and the platform do.
    """

    words: list[str]
    folder: str
    environment: dict[str, str]
    output: str
    errors: str
    cold: bool = False


def run_python(
    *words: object,
    ranks: int = 0,
    folder: Path | None = None,
    paths: tuple[Path, ...] = (),
    environment: dict[str, str] | None = None,
    timeout: float = 600,
) -> subprocess.CompletedProcess[str]:
    """`python WORDS`, a script or -m and a module, within `limit(timeout)` seconds, as a plain process or as ranks.

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
        program = Program(
            texts, str(folder or REPOSITORY), os.environ | own | (environment or {}), *[str(file) for file in files]
        )
        code = exit_code(wait_for(start(program, ranks), limit(timeout)))
        output, errors = (file.read_text() for file in files)
    if code is None:
        raise subprocess.TimeoutExpired(texts, limit(timeout), output, errors)
    return subprocess.CompletedProcess(texts, code, output, errors)


def start(program: Program, ranks: int = 0) -> list[Fork]:
    """Starts a program as each rank of a job on this machine, with torchrun's environment; with 0 as a plain process.

    Files of names with `{rank}` are a rank's own.
    """
    first = next(CALLS)
    if not ranks:
        return [PARENTS[first % len(PARENTS)].start(program)]
    common = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    begun: list[Fork] = []
    try:
        for rank in range(ranks):
            environment = program.environment | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            output, errors = (file.replace("{rank}", str(rank)) for file in (program.output, program.errors))
            own = replace(program, environment=environment, output=output, errors=errors)
            begun.append(PARENTS[(first + rank) % len(PARENTS)].start(own))
    except BaseException:
        for fork in begun:
            fork.kill()
        raise
    return begun


def wait_for(job: list[Fork], seconds: float) -> list[int | None]:
    """The exit codes of a job's processes; None of those that had to be ended.

    When one has failed, torchrun ends the others at once; here they have 2 s in which they may say more.
    """
    deadline, to_end, told = time.monotonic() + seconds, None, []
    try:
        while running := [fork for fork in job if fork.poll() is None]:
            if to_end is None and any(fork.returncode for fork in job):
                to_end = time.monotonic() + 2
                deadline = min(deadline, to_end + limit(30))
            if to_end and time.monotonic() > to_end:
                told = running
                for fork in told:
                    fork.kill(signal.SIGTERM)
                to_end = deadline
            if time.monotonic() > deadline:
                break
            running[0].wait(0.05)
        # What those say who are told to end is not why the job failed.
        return [-signal.SIGTERM if fork in told and fork.returncode else fork.returncode for fork in job]
    finally:
        for fork in job:
            fork.kill()


def exit_code(codes: list[int | None]) -> int | None:
    """The exit code of a job: of a process that failed by itself if any did; None if one had to be ended."""
    failures = sorted((code for code in codes if code), key=lambda code: code == -signal.SIGTERM)
    return next(iter(failures), None if None in codes else 0)


class Fork:
    """A program that was started: what is needed of `subprocess.Popen`, whose parent is another process."""

    def __init__(self, parent: Parent, pid: int) -> None:
        self._parent, self.pid = parent, pid

    @property
    def returncode(self) -> int | None:
        """Its exit code; None while it is not known to have ended."""
        return self._parent.codes.get(self.pid)

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return self.wait(0)

    def wait(self, seconds: float) -> int | None:
        """Its exit code; None if it still runs after so many seconds."""
        self._parent.listen(lambda: self.pid in self._parent.codes, seconds)
        return self.returncode

    def kill(self, by: signal.Signals = signal.SIGKILL) -> None:
        """Sends it and its process group a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, by)


class Parent:
    """A process that has imported what programs need, and forks; see `servers`."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._said: socket.SocketIO | None = None
        self._started: list[int] = []
        self.codes: dict[int, int] = {}

    def start(self, program: Program) -> Fork:
        """Starts a program."""
        if self._said is None:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(str(servers() / str(self._number)))
            self._said = connection.makefile("rwb", buffering=0)  # what has been read ahead, `select` does not know
        self._said.write(json.dumps(asdict(program)).encode() + b"\n")
        self.listen(lambda: self._started, limit(600))
        pid = self._started.pop()
        self.codes.pop(pid, None)  # of an earlier process that had this number
        return Fork(self, pid)

    def listen(self, until: Callable[[], object], seconds: float) -> None:
        """Reads what the process says until this holds, or for so many seconds."""
        assert self._said is not None
        deadline = time.monotonic() + seconds
        while not until():
            said, _, _ = select.select([self._said], [], [], max(0.0, deadline - time.monotonic()))
            if not said:
                return
            text = self._said.readline()
            if not text:
                raise RuntimeError("tests/forked_programs.py has ended; its traceback is on standard error")
            line = json.loads(text)
            if "started" in line:
                self._started.append(line["started"])
            else:
                self.codes[line["ended"]] = line["code"]


def servers() -> Path:
    """The folder with the sockets of both parents.

    The first process that asks starts them, for itself and for all that it starts; they end with it.
    """
    if SERVERS not in os.environ:
        folder = TemporaryDirectory()
        # -P, and no PYTHONPATH: what its forks import is theirs to say.
        server = [sys.executable, "-P", str(REPOSITORY / "tests" / "forked_programs.py")]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
        for number in range(len(PARENTS)):
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(Path(folder.name, str(number))))
                listener.listen()
                words, handed = [*server, str(listener.fileno())], [listener.fileno()]
                _serving.append(
                    subprocess.Popen(
                        words, env=environment, stdin=subprocess.PIPE, pass_fds=handed, start_new_session=True
                    )
                )
        _serving.append(folder)
        os.environ[SERVERS] = folder.name
    return Path(os.environ[SERVERS])


SERVERS = "GRPO_MEGA_TEST_SERVERS"
_serving: list[object] = []
"""What has to live as long as this process: the pipes that parents wait for, and their folder."""

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


PARENTS = (Parent(0), Parent(1))
"""Two, as forks of one process order sets of texts alike, and processes that are started do not: a job whose ranks
depend on that order must not pass."""
CALLS = itertools.count()
"""Every call begins with the other one, so that a run that goes on has another order, too."""
