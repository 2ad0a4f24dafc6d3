"""Watches a program that runs in a box: reads its output, ends it at a limit, reports its outcome."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from grpo_mega.judges.sandbox.limits import Limits, Outcome, Status
from grpo_mega.judges.sandbox.processes import Effort, effort, resident_bytes, tree, waited
from grpo_mega.judges.sandbox.start import BoxError

END_SECONDS = 30.0
"""Seconds for ending a program's processes; a box that takes longer is killed from outside."""
SLICE = 1.0
"""Seconds of one polling round; a longer one counts as this much, as the job must have been suspended."""

LOOK = 0.25
"""Seconds between checks of the memory and CPU waits of all of a program's processes."""
OWN_BYTES = 256 << 20
"""Bytes allowed in addition to the program's limit, for the box and the interpreters that it forks."""


class BoxLost(Exception):
    """A box ended, or did not answer, while a program ran in it."""


def watch(control: socket.socket, pipes: Sequence[int], limits: Limits, box: int) -> Outcome:
    """Reads a program's output and ends it at a limit; returns once none of its processes is alive.

    Args:
        control: The socket to the box.
        pipes: Pipes to read: standard output, standard error and, for a function, its result.
        limits: Limits of the program's resources.
        box: Process id of the box.

    Raises:
        BoxError: The program could not be started.
        BoxLost: The box has ended, or does not answer.
    """
    written = {pipe: bytearray() for pipe in pipes}
    counted = [pipes[0], *pipes[2:]]  # standard error beyond the limit is read and dropped
    status: Status = "exited"
    reason, asked, began = "", False, time.monotonic()
    looked, before, clock, left = began, began, ProgramClock(limits.wall_seconds, effort(tree(box))), END_SECONDS
    with selectors.PollSelector() as selector:
        for descriptor in (control.fileno(), *pipes):
            os.set_blocking(descriptor, False)
            selector.register(descriptor, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select(min(left if asked else clock.left, LOOK))}
            now = time.monotonic()  # reading and checking count as well: a program may keep this process busy
            passed, before = min(now - before, SLICE), now
            for pipe in ready & written.keys():
                if not _read(pipe, written[pipe], limits.output_bytes):
                    selector.unregister(pipe)
            if control.fileno() in ready:
                answer = _answer(control)
                break
            # Once asked to end the program, the box has END_SECONDS to answer; the program's limits no longer matter.
            if asked:
                left -= passed
                if left <= 0:
                    raise BoxLost(f"the box did not end a program within {END_SECONDS:g} s")
                continue
            clock.elapsed += passed
            if any(len(written[pipe]) > limits.output_bytes for pipe in counted):
                status, reason = "output", _too_much(limits)
            elif time.monotonic() - looked > LOOK or clock.left <= 0:
                looked, processes = time.monotonic(), tree(box)
                clock.look(effort(processes))
                if resident_bytes(processes[1:]) > limits.memory_bytes + OWN_BYTES:
                    status, reason = "memory", f"its processes used more than {limits.memory_bytes:,} bytes"
                elif clock.left <= 0:
                    status, reason = _out_of_time(clock)
            if status != "exited":
                with suppress(OSError):  # if the box has ended, the next round reads the end of file
                    control.send(b"end")
                asked = True
    for pipe, output in written.items():  # the answer may overtake output that is still in the pipes
        while _read(pipe, output, limits.output_bytes) and len(output) <= limits.output_bytes:
            pass
    if status == "exited" and any(len(written[pipe]) > limits.output_bytes for pipe in counted):
        status, reason = "output", _too_much(limits)
    stdout, stderr, *result = [bytes(output[: limits.output_bytes]) for output in written.values()]
    outcome = Outcome(status, None, stdout, stderr, b"".join(result), time.monotonic() - began, reason)
    return outcome if reason else _ended(outcome, json.loads(answer), limits)


def _out_of_time(clock: ProgramClock) -> tuple[Status, str]:
    """Status and reason for a program whose time is up; unknown ("infrastructure") if others kept it from running."""
    if clock.own >= clock.limit:
        return "time", f"did not end within {clock.limit:g} s"
    return "infrastructure", f"it waited for a CPU for {clock.waited:.2g} of {clock.elapsed:.2g} s: the machine is busy"


def _too_much(limits: Limits) -> str:
    return f"wrote more than {limits.output_bytes:,} bytes"


def _ended(outcome: Outcome, answer: dict[str, Any], limits: Limits) -> Outcome:
    """Outcome of a program that ended by itself, from the box's answer."""
    if "error" in answer:
        raise BoxError(answer["error"])
    if answer["status"] is None:
        raise BoxLost("the program's first process was killed")
    code = os.waitstatus_to_exitcode(answer["status"])
    if code == -signal.SIGXCPU:
        return replace(outcome, status="time", reason=f"used more than {limits.cpu_seconds} s of CPU time")
    return replace(outcome, exit_code=code)


def _answer(control: socket.socket) -> bytes:
    """Receives the box's message; raises BoxLost when the box has ended."""
    try:
        if answer := control.recv(1 << 16):
            return answer
    except OSError as error:
        raise BoxLost(f"the box ended: {error}") from error
    raise BoxLost("the box ended")


def _read(pipe: int, output: bytearray, most: int) -> bool:
    """Appends readable bytes, up to one more than `most` in all; False at end of file."""
    try:
        part = os.read(pipe, 1 << 16)
    except BlockingIOError:
        return False
    output += part[: max(0, most + 1 - len(output))]
    return bool(part)


MOST = 2
"""Upper bound on a program's wall time, as a multiple of its limit, however long it waits for a CPU."""


class ProgramClock:
    """Remaining wall time of one program.

    Attributes:
        limit: Seconds of wall time that the program may take.
        elapsed: Seconds of wall time since it began.
        waited: Seconds of `elapsed` in which it waited for a CPU.
    """

    def __init__(self, limit: float, before: Effort) -> None:
        """Starts the clock; `before` is the effort of the box (which may wait for a CPU too) up to now."""
        self.limit = limit
        self.elapsed, self.waited = 0.0, 0.0
        self._last = before

    @property
    def own(self) -> float:
        """Seconds that count against the limit: running, or waiting for anything but a CPU."""
        return self.elapsed - self.waited

    @property
    def left(self) -> float:
        """Seconds until the program is ended, provided that it does not wait for a CPU from now on."""
        return min(self.limit - self.own, MOST * self.limit - self.elapsed)

    def look(self, now: Effort) -> None:
        """Adds the time that the box and the program's processes waited for a CPU since the last call."""
        self.waited = min(max(0.0, self.waited + waited(self._last, now)), self.elapsed)
        self._last = now
