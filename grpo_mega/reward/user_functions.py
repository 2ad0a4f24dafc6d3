"""Functions of users, `reward.terms[].function`, run where nothing that they do reaches the run.

A function may exit, be killed, hang, fork, start programs, change its sample or the working directory, print without
end or take all memory. So all functions of a run are called in a process beside each rank (`user_worker.py`), each
time with a copy of the sample and within a time limit; what goes wrong is an error of the rank that names the term and
the sample, and with the process ends all that it has started.
"""

from __future__ import annotations

import codecs
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from typing import Any

from grpo_mega.reward.user_worker import END, STACK
from grpo_mega.types import Sample

IMPORT_SECONDS = 1800.0
"""Time limit for importing a function's module, which may load a model."""
SECONDS_TO_DIE = 30.0
"""How long the end of killed processes is waited for; a driver may hold them up."""
SHOWN_BYTES = 1 << 16
"""So much of what functions print is passed on to standard error; all of it is read."""
LAST_LINES = 15
LAST_BYTES = 4000
"""Of what was printed, shown with an error."""
SLICE = 1.0
"""Seconds; a longer break in the waiting does not count, the job was suspended then."""
DEFAULTS = {"PYTHONHASHSEED": "0", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
"""Environment of the process where this one's does not say otherwise: a rank that torchrun did not start is alone."""

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from grpo_mega.reward.user_worker import main; "
    "main(*map(int, sys.argv[2:]))"
)


class _Lost(Exception):
    """The worker does not answer any more; nothing is left of it."""


class UserFunctions:
    """The functions of a run, in their process."""

    def __init__(self, functions: dict[str, str], seed: int, seconds: float) -> None:
        """Imports them, with this process' import path, working directory and environment.

        Args:
            functions: Term -> import path `package.module:function`.
            seed: Of the run. What a function draws depends on it, the term and the sample.
            seconds: Time limit for a call.

        Raises:
            ValueError: One cannot be imported; names the term.
        """
        self._seed, self._seconds = seed, seconds
        self._start()
        for term, path in functions.items():
            try:
                answer = self._ask(("import", term, path), IMPORT_SECONDS, f"not done within {IMPORT_SECONDS:g} s")
                failed = answer.get("raised")
            except _Lost as lost:
                failed = str(lost)
            if failed:
                raise ValueError(f"reward term {term!r}: cannot import {path!r}: {failed}")

    def value(self, term: str, sample: Sample) -> float:
        """The term's value for one sample.

        Raises:
            ValueError: The function returns no finite number.
            RuntimeError: It fails, takes too long, or ends its process. Both name the term and the sample.
        """
        where = f"reward term {term!r}, prompt {sample.prompt.id!r}, sample {sample.index}"
        key = f"{self._seed}/{term}/{sample.prompt.id}/{sample.index}/{sample.policy_version}"
        try:
            late = f"no value within reward.timeout_seconds={self._seconds:g}"
            answer = self._ask(("call", term, sample, key), self._seconds, late)
        except _Lost as lost:
            raise RuntimeError(f"{where}: {lost}") from None
        if "raised" in answer:
            raise RuntimeError(f"{where}: {answer['raised']}\n{answer['traceback']}{self._last_words()}")
        if "returned" in answer:
            raise ValueError(
                f"{where}: returned {answer['returned']}; a reward must be a finite number (a float, int or bool)"
            )
        return answer["value"]

    def close(self) -> None:
        """Ends the process and all that it started; at the latest this happens when the interpreter ends."""
        self._end()

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        path = json.dumps([str(folder) for folder in sys.path])
        with theirs:
            # A session of its own keeps Ctrl-C away; -u, that the last words come before an end without warning.
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
        self._output = self._process.stdout.fileno()
        os.set_blocking(self._output, False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._poll.register(self._output, select.POLLIN)
        self._requests = 0
        self._said, self._shown, self._decoder = b"", 0, codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._end = weakref.finalize(self, _end, self._process, self._socket, os.getpid())

    def _ask(self, request: tuple[Any, ...], seconds: float, late: str) -> dict[str, Any]:
        """The worker's answer to a request; `late` is what the error says if there is none in time."""
        if not self._end.alive:
            raise _Lost("the process of this run's functions has ended before")
        message = pickle.dumps(request, pickle.HIGHEST_PROTOCOL)
        try:
            self._socket.settimeout(min(seconds, IMPORT_SECONDS))
            self._socket.sendall(len(message).to_bytes(8, "big") + message)
            line = self._listen(seconds)
        except OSError:  # among them that the worker's end is closed
            line = b""
        if line is None:
            raise self._late(late)
        self._requests += 1
        with suppress(ValueError):
            answer = json.loads(line)
            if isinstance(answer, dict) and answer.get("number") == self._requests:
                return answer
        raise self._lost(talks_nonsense=bool(line))

    def _listen(self, seconds: float) -> bytes | None:
        """The next line from the worker, less when it has ended, None when there is none in time."""
        left, line = seconds, b""
        while left > 0:
            began = time.monotonic()
            ready = [descriptor for descriptor, _ in self._poll.poll(1000 * min(left, SLICE))]
            left -= min(time.monotonic() - began, SLICE)
            if self._output in ready:
                self._hear()
            if self._socket.fileno() in ready:
                part = self._socket.recv(1 << 16)
                line += part
                if not part or line.endswith(b"\n"):
                    self._hear()
                    return line
        return None

    def _hear(self) -> None:
        """Takes what was printed: the first of it is shown, the last of it is kept for errors."""
        try:
            said = os.read(self._output, 1 << 20)
        except BlockingIOError:
            return
        self._said = (self._said + said)[-LAST_BYTES:]
        if not said or self._shown >= SHOWN_BYTES:
            return
        text = self._decoder.decode(said[: SHOWN_BYTES - self._shown])
        self._shown += len(said)
        if self._shown >= SHOWN_BYTES:
            text += f"\nreward functions have printed {SHOWN_BYTES} bytes: no more of it is shown\n"
        with suppress(OSError):  # nobody may read it any more
            sys.stderr.write(text)

    def _late(self, late: str) -> _Lost:
        """Ends a worker that takes too long, and says where it was."""
        self._process.send_signal(STACK)
        self._poll.unregister(self._socket)
        wait = 5.0
        for _ in range(10):  # a stack is written in pieces; other output may not stop
            if not self._poll.poll(1000 * wait):
                break
            self._hear()
            wait = 0.2
        self.close()
        return _Lost(f"{late}{self._last_words()}")

    def _lost(self, talks_nonsense: bool) -> _Lost:
        """Says how the worker has ended, or ends it because the function has written into its socket."""
        how = "was ended: the function has written into a descriptor that is not its own"
        if not talks_nonsense:
            self._socket.close()
            how = self._how_it_ended()
        self._hear()
        self.close()
        return _Lost(f"the process that runs the function {how}{self._last_words()}")

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(SECONDS_TO_DIE)
        except subprocess.TimeoutExpired:
            return "does not answer"
        if code <= 128:
            return f"ended with exit code {code}"
        memory = " (memory may have run out)" if code == 128 + signal.SIGKILL else ""
        return f"was killed by {_name(code - 128)}{memory}"

    def _last_words(self) -> str:
        lines = self._said.decode(errors="replace").splitlines()[-LAST_LINES:]
        return "".join(["\nthe last that it printed:", *(f"\n    {line}" for line in lines)]) if lines else ""


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _end(process: subprocess.Popen[bytes], connection: socket.socket, owner: int) -> None:
    """Ends the guard, and with it all that it guards. A fork of the rank has no say in it."""
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
