"""Runs sympy in worker processes that the kernel kills when a comparison takes too long.

A hostile answer such as `9^{9^9}` keeps sympy busy forever, in C code that no Python exception interrupts, and
math-verify's own time-outs work only in a main thread. So every comparison runs in a worker: a bare interpreter (it
never imports this project or torch) that is started on first use, limits its own CPU time and memory, and ends when its
standard input closes, however this process dies. CPU time, unlike wall time, gives the same verdict on a busy machine.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

from grpo_mega.platform.trace import beside

CPU_SECONDS = 2.0
"""CPU time of one comparison, in seconds; a longer one counts as not equivalent."""
WALL_SECONDS = 60.0
"""Wall-clock limit in seconds, for a worker that gets no CPU time on a busy machine."""
START_SECONDS = 300.0
"""Seconds for starting an interpreter and importing sympy on a busy machine."""
MEMORY_BYTES = 4 << 30
"""Address space of one worker."""

AnswerPairs = tuple[tuple[str, str], ...]

_SCRIPT = Path(__file__).with_name("symbolic_worker.py")
_logger = logging.getLogger(__name__)
_warned = threading.Event()
_idle: list[_Worker] = []
# A forked child that kept these pipes would mix its questions into its parent's, and keep orphaned workers alive.
os.register_at_fork(after_in_child=_idle.clear)


class _Worker:
    """One worker process and the pipes to it; one question at a time."""

    def __init__(self) -> None:
        # -P keeps the script's folder off sys.path, where `format.py` and its siblings would shadow other modules.
        # Without buffers, no part of an answer hides in Python's memory, where `wait` does not see it. The hash seed
        # is fixed so that the order in which sympy visits sets, and with it a verdict, is the same in every worker.
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(_SCRIPT), str(CPU_SECONDS), str(MEMORY_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
        if self._read(START_SECONDS) != b"ready\n":
            self.close()
            raise RuntimeError(
                f"the symbolic worker did not start (exit code {self.process.returncode}); its error is on stderr. "
                f"Check that `{sys.executable} -c 'import sympy, latex2sympy2_extended'` works"
            )

    def ask(self, pairs: AnswerPairs) -> list[bool] | None:
        """Verdict for each pair, or None if the worker died on the question."""
        assert self.process.stdin is not None
        # It may have died since it was last polled; then there is nothing to read below.
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(pairs).encode() + b"\n")
        line = self._read(WALL_SECONDS)
        return json.loads(line) if line else None

    def close(self) -> None:
        """Kills the process, which holds no state, and waits until it has ended."""
        self.process.kill()
        self.process.communicate()

    def _read(self, seconds: float) -> bytes:
        """Reads one line; b"" when the process ended or wrote nothing within `seconds`."""
        assert self.process.stdout is not None
        # Not `select`, which refuses descriptors above 1,023.
        return self.process.stdout.readline() if wait([self.process.stdout.fileno()], seconds) else b""


@functools.lru_cache(maxsize=4096)
def symbolically_equal(pairs: AnswerPairs) -> tuple[bool, ...]:
    """For each pair (answer, truth), whether sympy proves them equal; all pairs share the limits of one question.

    Thread-safe: concurrent calls use different workers. Callers bound length and nesting first (`verify.py`). Results
    are cached, as a whole group may repeat a wrong answer.
    """
    # A worker that fails does not return to the list; the next question starts a new one.
    worker = _take_idle() or _Worker()
    with beside("sympy", "compare", pairs=len(pairs), process=worker.process.pid):
        verdicts = worker.ask(pairs)
    if verdicts is None:
        worker.close()
        _warn_once(pairs[0][0], worker.process.returncode)
        return (False,) * len(pairs)
    _idle.append(worker)
    return tuple(verdicts)


def close_workers() -> None:
    """Ends every idle worker; the next comparison starts a new one."""
    while (worker := _take_idle()) is not None:
        worker.close()


def _take_idle() -> _Worker | None:
    """A live idle worker, or None."""
    while _idle:
        # Several threads share the list without a lock: another one may take the last worker after the test above.
        try:
            worker = _idle.pop()
        except IndexError:
            return None
        if worker.process.poll() is None:
            return worker
        worker.close()
    return None


def _warn_once(answer: str, code: int) -> None:
    """Logs a warning for the first answer that a worker failed on, and only for that."""
    if not _warned.is_set():
        _warned.set()
        _logger.warning(
            "the symbolic worker gave up on the answer %.80r (exit code %d; limits: %g s of CPU, %d GiB): counted as "
            "wrong. Further cases are not logged.",
            answer,
            code,
            CPU_SECONDS,
            MEMORY_BYTES >> 30,
        )


atexit.register(close_workers)
