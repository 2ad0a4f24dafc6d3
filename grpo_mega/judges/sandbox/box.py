"""A box: a sandbox process that runs programs one after the other, each in a fresh process (`inside.py`)."""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import select
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from typing import Any

from grpo_mega.judges.sandbox.inside import RUN, RUN_WITH_FILES
from grpo_mega.judges.sandbox.limits import Limits, Outcome
from grpo_mega.judges.sandbox.processes import session, threads_of
from grpo_mega.judges.sandbox.start import ENVIRONMENT, BoxError, Mechanism, command, modules, unused_uid
from grpo_mega.judges.sandbox.watch import END_SECONDS, BoxLost, watch

START_SECONDS = 120.0
"""Seconds within which a box must have started; generous, for busy machines."""
COUNTED_PER_NAMESPACE = (5, 14)
"""First Linux release that counts the processes of each user namespace separately."""

SPARE = 32
"""Processes that the user may start elsewhere during a program, where the kernel counts them as the program's."""


class Box:
    """A sandbox process that runs one program at a time. Not thread-safe."""

    def __init__(self, mechanism: Mechanism, read_only: Sequence[str] = ()) -> None:
        """Starts the box.

        Args:
            mechanism: How programs are contained.
            read_only: Further files and folders that programs may read.

        Raises:
            BoxError: The box cannot be started.
        """
        self.mechanism = mechanism
        self._uid = unused_uid()
        try:
            with ExitStack() as stack:
                self._start(stack, read_only)
        except OSError as error:
            raise BoxError(f"{mechanism}: {error}") from error

    def _start(self, stack: ExitStack, read_only: Sequence[str]) -> None:
        """Starts the box's process and waits until it is ready; `stack` closes what only the start needs."""
        # Sequenced packets keep message boundaries, so that one `recv` is one message, and still report an end of file.
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stack.enter_context(theirs)
        owner = os.pidfd_open(os.getpid())
        stack.callback(os.close, owner)
        # A file in memory rather than a pipe: nobody reads it unless the start fails, and an unread pipe fills up.
        messages = os.memfd_create("messages")
        stack.callback(os.close, messages)
        self._process = self._popen(read_only, [theirs.fileno(), owner], messages)
        # As long as this process held the box's end open, the death of the box would not show as an end of file.
        theirs.close()
        self._control.settimeout(START_SECONDS)
        try:
            ready = self._control.recv(16) == b"ready"
        except TimeoutError:
            ready = False
        if not ready:
            self.close()
            message = os.pread(messages, 2000, 0).decode(errors="replace").strip()
            raise BoxError(f"{self.mechanism}: {message or f'it ended with code {self._process.returncode}'}")

    def _popen(self, read_only: Sequence[str], descriptors: list[int], messages: int) -> subprocess.Popen[bytes]:
        """Starts the box's process; where this process is root, as a separate user."""
        started = command(self.mechanism, self._uid, read_only, descriptors)
        user: dict[str, Any] = {"user": self._uid, "group": self._uid, "extra_groups": []} if self._uid else {}
        process = subprocess.Popen(
            started,
            stdin=subprocess.PIPE,
            stdout=messages,
            stderr=messages,
            env=ENVIRONMENT,
            cwd="/",
            pass_fds=descriptors,
            start_new_session=True,
            **user,
        )
        assert process.stdin is not None
        # A box that has died already breaks the pipe; `_start` then reports what it printed.
        with suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(json.dumps(modules()).encode())
        return process

    def run(self, request: dict[str, Any], stdin: bytes, limits: Limits) -> Outcome:
        """Runs one program and returns its outcome.

        Args:
            request: "argv", or "source" and "call", and "files"; see `inside.py`.
            stdin: The program's standard input.
            limits: Limits of the program's resources.

        Raises:
            BoxError: The program could not be started.
            BoxLost: The box has ended or does not answer, and must be closed.
        """
        used = asdict(limits)
        # RLIMIT_NPROC limits the processes of a user, not of a program, so the count includes those already running.
        release = tuple(int(number) for number in os.uname().release.split(".")[:2])
        if self._uid or (self.mechanism == "bubblewrap" and release >= COUNTED_PER_NAMESPACE):
            used["processes"] += 2
        else:
            used["processes"] += threads_of(os.getuid()) + SPARE
        with ExitStack() as ours:
            # Closed before `watch`: a writing end that stays open here would keep the pipes from reaching their end.
            with ExitStack() as theirs:
                try:
                    given = [_in_memory(content, theirs) for content in (pickle.dumps(used | request, 4), stdin)]
                    pipes = []
                    for _ in range(3 if request["call"] else 2):
                        reader, writer = os.pipe()
                        ours.callback(os.close, reader)
                        theirs.callback(os.close, writer)
                        pipes.append((reader, writer))
                except OSError as error:
                    raise BoxError(f"{self.mechanism}: {error}") from error
                try:
                    socket.send_fds(
                        self._control,
                        [RUN_WITH_FILES if request["files"] else RUN],
                        [*given, *(end for _, end in pipes)],
                    )
                except OSError as error:
                    raise BoxLost(f"the sandbox process has exited: {error}") from error
            outcome = watch(self._control, [end for end, _ in pipes], limits, self._process.pid)
            return replace(outcome, box=self._process.pid)

    @property
    def alive(self) -> bool:
        """Whether the box is waiting for a program: its socket then has neither a message nor an end of file."""
        return not _ready(self._control.fileno(), 0)

    def close(self) -> None:
        """Ends the box and every process in it."""
        with suppress(OSError):
            # `close` alone would leave the connection open in forks of this process, and the box would live on.
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        ended = os.pidfd_open(self._process.pid)
        _ready(ended, END_SECONDS)
        os.close(ended)
        # The box has not been reaped yet, so the kernel cannot have given its process id to another process.
        for pid in session(self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


def _in_memory(content: bytes, stack: ExitStack) -> int:
    """Descriptor of an unnamed, sealed (read-only) file in memory; `stack` closes it."""
    file = os.memfd_create("given", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    stack.callback(os.close, file)
    with open(file, "wb", closefd=False) as opened:
        opened.write(content)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _ready(descriptor: int, seconds: float) -> bool:
    """Whether `descriptor` becomes readable within `seconds`. Uses poll, as `select` takes no descriptor above 1023."""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(1000 * seconds))
