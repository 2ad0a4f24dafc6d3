"""Runs users' reward functions, `reward.terms[].function`, in a separate process, where they cannot harm the run.

A function may exit, be killed, hang, fork, start programs, change its sample or the working directory, print without
end or take all memory. So each rank has a process (`user_worker.py`) that calls the functions, each time with a copy of
the sample and within a time limit. A failure becomes an error of the rank that names the term and the sample;
everything that the process started ends with it.
"""

from __future__ import annotations

import codecs
import json
import os
import pickle
import re
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from grpo_mega.errors import InputError
from grpo_mega.judges.sandbox.guard import END
from grpo_mega.platform.trace import beside
from grpo_mega.reward.user_worker import AT_ONCE, MOST_AT_ONCE, ONE, STACK
from grpo_mega.reward.verdict import Verdict, read_verdict
from grpo_mega.types import Sample

IMPORT_SECONDS = 1800.0
"""Seconds for importing a function's module, which may load a model."""
SECONDS_TO_DIE = 30.0
"""Seconds to wait for killed processes to end, which a driver may delay."""
STACK_SECONDS = 5.0
"""Seconds that an overdue process gets to print its stack."""
GRACE_SECONDS = 5.0
"""Extra seconds before the worker is killed for an async function that ignores its time limit."""
SHOWN_BYTES = 1 << 16
"""Bytes of the functions' output forwarded to standard error; the rest is read and dropped."""
LAST_LINES = 15
"""Number of last lines of output shown in an error."""
LAST_BYTES = 4000
"""Bytes of output kept for an error."""
SLICE = 1.0
"""Seconds of one wait; a longer one counts as this much, as the job must have been suspended."""
DEFAULTS = {"PYTHONHASHSEED": "0", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
"""Environment variables set for the worker if missing: a rank not started by torchrun is the only one."""

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from grpo_mega.reward.user_worker import main; "
    "main(*map(int, sys.argv[2:]))"
)


class OutOfCpu(RuntimeError):
    """Error: a call used up the CPU seconds of its timer (`signal.ITIMER_PROF`), which ended its process."""


class _Lost(Exception):
    """Error: the worker no longer answers; it and its children have been killed.

    Attributes:
        exit_code: That of the process, see `user_worker.py`; None if it did not end by itself.
    """

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class UserFunction:
    """A user function: its import path `package.module:function`, and its arguments after the sample."""

    path: str
    options: dict[str, Any] = field(default_factory=dict)


def import_fix(path: str, raised: str) -> str:
    """What to do about the import of `module:name`, or of several with commas between, that `raised` this."""
    found = re.match(r"ModuleNotFoundError: No module named '([^']+)'", raised)
    modules = [part.partition(":")[0].strip() for part in path.split(",")]
    if found and any(f"{module}.".startswith(f"{found[1]}.") for module in modules):
        return "start in the folder where it is, add that folder to PYTHONPATH, or correct its name"
    if found:
        return "install it"
    return "correct the name" if raised.startswith("AttributeError") else "correct the module"


class UserFunctions:
    """User-defined reward functions of a run, and the process that runs them."""

    def __init__(self, functions: dict[str, UserFunction], seed: int, seconds: float, restart: bool = False) -> None:
        """Imports the functions, with this process's import path, working directory and environment.

        Args:
            functions: Functions by name of their term.
            seed: Seed of the run. A function's random numbers depend on it, the term and the sample.
            seconds: Time limit for a call.
            restart: Whether to start a new process after a call that ended it.

        Raises:
            InputError: A function cannot be imported; names the term.
        """
        self._functions, self._seed, self._seconds, self._restart = functions, seed, seconds, restart
        # For each function, how it takes samples; see `user_worker.Function`.
        self._forms: dict[str, str] = {}
        self._start()
        self._import()

    def _import(self) -> None:
        for term, function in self._functions.items():
            try:
                request = ("import", term, function.path, function.options)
                answer = self._ask(request, IMPORT_SECONDS, f"not done within {IMPORT_SECONDS:g} s")
                failed = answer.get("raised")
            except _Lost as lost:
                failed = str(lost)
            if failed:
                what = f"cannot import {function.path!r}: {failed}"
                fix = "leave out .py" if ".py:" in function.path else import_fix(function.path, failed)
                raise InputError(f"reward term {term!r}", what, fix)
            self._forms[term] = answer["form"]

    @property
    def alive(self) -> bool:
        """Whether the process has not been ended; the next call starts a new one if `restart`."""
        return self._end.alive

    def value(self, name: str, *arguments: Any, seconds: float | None = None) -> Any:
        """The value, of JSON types, that a function returns for these arguments, within the usual time or `seconds`.

        Raises:
            RuntimeError: It raised, took too long, returned something else, or ended its process. The cause of one that
                raised an InputError is that.
            OutOfCpu: It used up the CPU seconds for which it had set a timer.
        """
        seconds = self._seconds if seconds is None else seconds
        late = f"no answer within {seconds:g} s"
        try:
            self._start_if_ended()
            answer = self._ask(("value", name, *arguments), seconds, late)
        except _Lost as lost:
            error = OutOfCpu if lost.exit_code == 128 + signal.SIGPROF else RuntimeError
            raise error(str(lost)) from None
        if "raised" in answer:
            refused = InputError(*answer["input"]) if "input" in answer else None
            raise RuntimeError(f"{answer['raised']}\n{answer['traceback']}{self._output_for_error()}") from refused
        return answer["value"]

    def _start_if_ended(self) -> None:
        if self._restart and not self._end.alive:
            self._start()
            self._import()

    def outcomes(self, term: str, samples: Sequence[Sample]) -> Iterator[Verdict | Exception]:
        """Yields the outcome of the term's function for each sample: a verdict, or the exception that prevented one.

        The function is called lazily, unless it takes several samples at once. A ValueError stands for a value that is
        not a verdict, a RuntimeError for a function that fails, takes too long, or ends its process.
        """
        if self._forms[term] == ONE:
            for sample in samples:
                yield from self._call(term, [sample])
        elif samples:
            yield from self._call(term, samples)

    def _call(self, term: str, samples: Sequence[Sample]) -> list[Verdict | Exception]:
        keys = [f"{self._seed}/{term}/{s.prompt.id}/{s.index}/{s.policy_version}" for s in samples]
        late = f"no value within reward.timeout_seconds={self._seconds:g}"
        # `experts` is a tensor: unpickling it would import torch in the worker.
        light = [replace(sample, experts=None) for sample in samples]
        seconds = self._seconds
        # The worker enforces the limit of each sample. This one only ends a worker that does not, after as many limits
        # as there are rounds of concurrent samples.
        if self._forms[term] == AT_ONCE:
            seconds = self._seconds * ceil(len(samples) / MOST_AT_ONCE) + GRACE_SECONDS
        try:
            self._start_if_ended()
            first = f"{samples[0].prompt.id} #{samples[0].index}"
            with beside("reward functions", term, samples=len(samples), first=first, process=self._process.pid):
                answer = self._ask(("call", term, light, keys, self._seconds), seconds, late)
        except _Lost as lost:
            return [RuntimeError(str(lost)) for _ in samples]
        outcomes = answer.get("outcomes") or [answer] * len(samples)
        return [self._outcome(outcome, late) for outcome in outcomes]

    def _outcome(self, outcome: dict[str, Any], late: str) -> Verdict | Exception:
        if "late" in outcome:
            return RuntimeError(f"{late}{self._output_for_error()}")
        if "raised" in outcome:
            return RuntimeError(f"{outcome['raised']}\n{outcome['traceback']}{self._output_for_error()}")
        if "returned" in outcome:
            return ValueError(outcome["returned"])
        return read_verdict(outcome)

    def close(self) -> None:
        """Ends the process and everything that it started; interpreter exit does so too."""
        self._end()

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        path = json.dumps([str(folder) for folder in sys.path])
        with theirs:
            # A new session shields it from Ctrl-C; -u, so that output is complete when it ends abruptly.
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-P", "-c", _START, path, str(os.getpid()), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                env=DEFAULTS | os.environ,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        assert self._process.stdout is not None
        self._output_fd = self._process.stdout.fileno()
        # Output is read only while an answer is awaited, and a read must never wait for more.
        os.set_blocking(self._output_fd, False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._poll.register(self._output_fd, select.POLLIN)
        self._requests = 0
        self._output_tail, self._shown_bytes = b"", 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._end = weakref.finalize(self, _end, self._process, self._socket, os.getpid())

    def _ask(self, request: tuple[Any, ...], seconds: float, late: str) -> dict[str, Any]:
        """Sends a request and returns the worker's answer; `late` is the error's text for none within `seconds`."""
        if not self._end.alive:
            raise _Lost("the process of this run's functions has already ended")
        message = pickle.dumps(request, pickle.HIGHEST_PROTOCOL)
        try:
            self._socket.settimeout(min(seconds, IMPORT_SECONDS))
            self._socket.sendall(len(message).to_bytes(8, "big") + message)
            line = self._next_line(seconds)
        # A worker that has ended closes its end of the socket, which is handled like an empty answer below.
        except OSError:
            line = b""
        if line is None:
            raise self._late(late)
        # A function may write into any descriptor. Only an answer with the number of this request is the worker's.
        self._requests += 1
        with suppress(ValueError):
            answer = json.loads(line)
            if isinstance(answer, dict) and answer.get("number") == self._requests:
                return answer
        raise self._lost(invalid=bool(line))

    def _next_line(self, seconds: float) -> bytes | None:
        """Next line from the worker, incomplete if the worker has ended; None if there is none within `seconds`."""
        left, line = seconds, b""
        while left > 0:
            began = time.monotonic()
            ready = [descriptor for descriptor, _ in self._poll.poll(1000 * min(left, SLICE))]
            left -= min(time.monotonic() - began, SLICE)
            if self._output_fd in ready:
                self._read_output()
            if self._socket.fileno() in ready:
                part = self._socket.recv(1 << 16)
                line += part
                if not part or line.endswith(b"\n"):
                    self._read_output()
                    return line
        return None

    def _read_output(self) -> None:
        """Reads the functions' output: forwards the first SHOWN_BYTES and keeps the last LAST_BYTES for errors."""
        try:
            output = os.read(self._output_fd, 1 << 20)
        except BlockingIOError:
            return
        self._output_tail = (self._output_tail + output)[-LAST_BYTES:]
        if not output or self._shown_bytes >= SHOWN_BYTES:
            return
        text = self._decoder.decode(output[: SHOWN_BYTES - self._shown_bytes])
        self._shown_bytes += len(output)
        if self._shown_bytes >= SHOWN_BYTES:
            text += f"\nreward functions have printed {SHOWN_BYTES} bytes: the rest is not shown\n"
        # Standard error may be closed.
        with suppress(OSError):
            sys.stderr.write(text)

    def _late(self, late: str) -> _Lost:
        """Kills a worker that takes too long; the error shows its stack."""
        # The guard forwards the signal to the worker. Only output is awaited from here on: an answer now would be too
        # late.
        self._process.send_signal(STACK)
        self._poll.unregister(self._socket)
        wait = STACK_SECONDS
        # A stack is written in pieces, so one read is not enough; other output may never stop, so reads are limited.
        for _ in range(10):
            if not self._poll.poll(1000 * wait):
                break
            self._read_output()
            wait = 0.2
        self.close()
        return _Lost(f"{late}{self._output_for_error()}")

    def _lost(self, invalid: bool) -> _Lost:
        """Error for a worker that has ended, or that is killed here because a function wrote into its socket."""
        code, how = None, "was ended: the function has written to a file descriptor that is not its own"
        if not invalid:
            # Closing the socket also ends a worker that is alive but has closed its own end.
            self._socket.close()
            try:
                code = self._process.wait(SECONDS_TO_DIE)
            except subprocess.TimeoutExpired:
                how = "does not answer"
            else:
                number = code - 128
                name = next((one.name for one in signal.Signals if one == number), f"signal {number}")
                memory = " (memory may have run out)" if code == 128 + signal.SIGKILL else ""
                how = f"ended with exit code {code}" if code <= 128 else f"was killed by {name}{memory}"
        self._read_output()
        self.close()
        return _Lost(f"the process that runs the function {how}{self._output_for_error()}", code)

    def _output_for_error(self) -> str:
        lines = self._output_tail.decode(errors="replace").splitlines()[-LAST_LINES:]
        return "".join(["\nits last output:", *(f"\n    {line}" for line in lines)]) if lines else ""


def _end(process: subprocess.Popen[bytes], connection: socket.socket, owner: int) -> None:
    """Ends the guard and everything that it guards; in a fork of the process `owner`, only closes the connection."""
    connection.close()
    if os.getpid() != owner:
        return
    process.send_signal(END)
    try:
        process.wait(SECONDS_TO_DIE)
    except subprocess.TimeoutExpired:
        process.kill()
    assert process.stdout is not None
    process.stdout.close()
