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
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from grpo_mega.errors import InputError
from grpo_mega.judges.sandbox.guard import END
from grpo_mega.platform.trace import beside
from grpo_mega.reward.user_worker import AT_ONCE, MOST_AT_ONCE, ONE, SERVE, STACK
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


@dataclass
class Question:
    """A call of an async function that `UserFunctions.serve` makes.

    Attributes:
        answer: Will have what the function returns, or the RuntimeError of a call that fails.
        alone: Whether no other call may be under way at the same time.
        left: Seconds until the process is ended, as it does not answer.
    """

    name: str
    arguments: tuple[Any, ...]
    seconds: float
    answer: Future[Any] = field(default_factory=Future)
    alone: bool = False
    left: float = 0.0


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
    """User-defined reward functions of a run, and the process that runs them.

    Attributes:
        asks_again: Whether `serve` asks again what was under way when the process ended.
    """

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
        self.asks_again = True
        # For each function, how it takes samples; see `user_worker.Function`.
        self._forms: dict[str, str] = {}
        self._woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._woken)
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
        if failure := self._failure(answer, late):
            raise failure
        return answer["value"]

    def serve(self, waiting: deque[Question]) -> None:
        """Asks these questions, and those that are added and announced by `wake` meanwhile, `MOST_AT_ONCE` at a time,
        until all are answered or the process has ended.

        Those under way at its end wait again, each to be asked alone: only the one that ends the process has failed.

        Raises:
            InputError: The process cannot be started.
        """
        self._start_if_ended()
        under_way: dict[int, Question] = {}
        received = b""
        try:
            self._send(SERVE, GRACE_SECONDS)
            while waiting or under_way:
                while waiting:
                    alone = any(question.alone for question in (waiting[0], *under_way.values()))
                    if len(under_way) >= (1 if alone else MOST_AT_ONCE):
                        break
                    question = under_way[self._requests + 1] = waiting.popleft()
                    question.left = question.seconds + GRACE_SECONDS
                    call = (question.name, question.arguments, question.seconds)
                    self._send(pickle.dumps(call, pickle.HIGHEST_PROTOCOL), question.left)
                waited, part = self._wait(min(question.left for question in under_way.values()))
                *lines, received = (received + (part or b"")).split(b"\n")
                for line in lines:
                    answer = self._answer_in(line, under_way)
                    if not answer.keys() & {"value", "raised", "late"}:
                        raise self._lost(invalid=True)
                    question = under_way.pop(answer["number"])
                    if failure := self._failure(answer, f"no answer within {question.seconds:g} s"):
                        question.answer.set_exception(failure)
                    else:
                        question.answer.set_result(answer["value"])
                if part == b"":
                    raise self._lost(invalid=bool(received))
                for question in under_way.values():
                    question.left -= waited
                    if question.left <= 0:
                        raise self._late(f"no answer within {question.seconds:g} s")
            self._answer_to(self._send(b"", GRACE_SECONDS), GRACE_SECONDS, "calls do not end")
        except _Lost as lost:
            if len(under_way) > 1 and self.asks_again:
                for question in reversed(under_way.values()):
                    question.alone = True
                    waiting.appendleft(question)
                under_way.clear()
            for question in under_way.values():
                question.answer.set_exception(RuntimeError(str(lost)))
        # Nobody may wait without end, whatever a function has written into the socket.
        except Exception as error:
            self._end()
            for question in under_way.values():
                question.answer.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))

    def wake(self) -> None:
        """Makes `serve` look for more questions; any thread may call it."""
        os.eventfd_write(self._woken, 1)

    def _start_if_ended(self) -> None:
        if self._restart and not self._end.alive:
            self._start()
            # Another thread may have closed it meanwhile.
            if not self._restart:
                self._end()
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
        return [
            self._failure(one, late) or (ValueError(one["returned"]) if "returned" in one else read_verdict(one))
            for one in outcomes
        ]

    def _failure(self, outcome: dict[str, Any], late: str) -> RuntimeError | None:
        """The error of a call that raised, or whose time was over."""
        if "late" in outcome:
            return RuntimeError(f"{late}{self._output_for_error()}")
        if "raised" not in outcome:
            return None
        failure = RuntimeError(f"{outcome['raised']}\n{outcome['traceback']}{self._output_for_error()}")
        failure.__cause__ = InputError(*outcome["input"]) if "input" in outcome else None
        return failure

    def close(self) -> None:
        """Ends the process and everything that it started, for good; interpreter exit does so too."""
        self._restart = False
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
        self._poll.register(self._woken, select.POLLIN)
        self._requests = 0
        self._output_tail, self._shown_bytes = b"", 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._end = weakref.finalize(self, _end, self._process, self._socket, os.getpid())

    def _ask(self, request: tuple[Any, ...], seconds: float, late: str) -> dict[str, Any]:
        """Sends a request and returns the worker's answer; `late` is the error's text for none within `seconds`."""
        if not self._end.alive:
            raise _Lost("the process of this run's functions has already ended")
        number = self._send(pickle.dumps(request, pickle.HIGHEST_PROTOCOL), seconds)
        return self._answer_to(number, seconds, late)

    def _send(self, message: bytes, seconds: float) -> int:
        """Sends a message; returns its number."""
        self._requests += 1
        try:
            self._socket.settimeout(min(seconds, IMPORT_SECONDS))
            self._socket.sendall(len(message).to_bytes(8, "big") + message)
        # A worker that has ended closes its end of the socket.
        except OSError:
            raise self._lost(invalid=False) from None
        return self._requests

    def _answer_to(self, number: int, seconds: float, late: str) -> dict[str, Any]:
        left, line = seconds, b""
        while left > 0:
            waited, part = self._wait(left)
            left -= waited
            line += part or b""
            if part == b"" or line.endswith(b"\n"):
                self._read_output()
                return self._answer_in(line, [number])
        raise self._late(late)

    def _wait(self, seconds: float) -> tuple[float, bytes | None]:
        """Waits for the worker, for `SLICE` at most: how long that counts, and what it sent; None for nothing, b"" once
        it has ended."""
        if not self._end.alive:
            return 0.0, b""
        began, part = time.monotonic(), None
        try:
            ready = [descriptor for descriptor, _ in self._poll.poll(1000 * min(seconds, SLICE))]
            if self._woken in ready:
                os.eventfd_read(self._woken)
            if self._output_fd in ready:
                self._read_output()
            if self._socket.fileno() in ready:
                part = self._socket.recv(1 << 16)
        except OSError:
            part = b""
        return min(time.monotonic() - began, SLICE), part

    def _answer_in(self, line: bytes, expected: Collection[int]) -> dict[str, Any]:
        """The answer in a line. A function may write into any descriptor: what is not the answer to an expected request
        is not the worker's."""
        with suppress(ValueError, TypeError, RecursionError):
            answer = json.loads(line)
            if isinstance(answer, dict) and answer.get("number") in expected:
                return answer
        raise self._lost(invalid=bool(line))

    def _read_output(self) -> None:
        """Reads the functions' output: forwards the first SHOWN_BYTES and keeps the last LAST_BYTES for errors."""
        assert self._process.stdout is not None
        try:
            output = self._process.stdout.read(1 << 20)
        # Another thread has ended the process, and closed the file.
        except (OSError, ValueError):
            return
        if output is None:
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
        self._poll.unregister(self._woken)
        wait = STACK_SECONDS
        # A stack is written in pieces, so one read is not enough; other output may never stop, so reads are limited.
        for _ in range(10):
            if not self._poll.poll(1000 * wait):
                break
            self._read_output()
            wait = 0.2
        self._end()
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
        self._end()
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
