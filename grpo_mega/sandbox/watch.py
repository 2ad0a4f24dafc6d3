"""Watches a program that runs in a box: reads what it writes, ends it at a limit, says what became of it."""

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

from grpo_mega.sandbox.clock import Clock
from grpo_mega.sandbox.limits import Limits, Outcome, Status
from grpo_mega.sandbox.processes import effort, resident_bytes, tree
from grpo_mega.sandbox.start import BoxError

END_SECONDS = 30.0
"""Limit for ending a program's processes; a box that takes longer is ended from outside."""
SLICE = 1.0
"""Seconds of one round; one that took longer counts as this much, because the job was suspended meanwhile."""

LOOK = 0.25
"""Seconds between looks at all of a program's processes: their memory, and what they wait for."""
OWN_BYTES = 256 << 20
"""What a box and the interpreters that it forks may use besides."""


class BoxLost(Exception):
    """A box ended, or did not answer, while a program ran in it."""


def watch(control: socket.socket, pipes: Sequence[int], limits: Limits, box: int) -> Outcome:
    """Reads what a program writes and ends it at a limit; returns when nothing of it is alive any more.

    Args:
        control: The socket to the box.
        pipes: What to read: standard output, standard error and, for a function, its result.
        limits: What the program may use.
        box: Process id of the box.

    Raises:
        BoxError: The program could not be begun.
        BoxLost: The box has ended, or does not answer.
    """
    written = {pipe: bytearray() for pipe in pipes}
    counted = [pipes[0], *pipes[2:]]  # of standard error the rest is only dropped
    status: Status = "exited"
    reason, asked, began = "", False, time.monotonic()
    looked, before, clock, left = began, began, Clock(limits.wall_seconds, effort(tree(box))), END_SECONDS
    with selectors.PollSelector() as selector:
        for descriptor in (control.fileno(), *pipes):
            os.set_blocking(descriptor, False)
            selector.register(descriptor, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select(min(left if asked else clock.left, LOOK))}
            now = time.monotonic()  # what reading and looking took counts as well: a program may keep this busy
            passed, before = min(now - before, SLICE), now
            for pipe in ready & written.keys():
                if not _read(pipe, written[pipe], limits.output_bytes):
                    selector.unregister(pipe)
            if control.fileno() in ready:
                answer = _answer(control)
                break
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
                with suppress(OSError):  # it has ended: there is nothing to read but that
                    control.send(b"end")
                asked = True
    for pipe, output in written.items():  # what was written last
        while _read(pipe, output, limits.output_bytes) and len(output) <= limits.output_bytes:
            pass
    if status == "exited" and any(len(written[pipe]) > limits.output_bytes for pipe in counted):
        status, reason = "output", _too_much(limits)
    stdout, stderr, *result = [bytes(output[: limits.output_bytes]) for output in written.values()]
    outcome = Outcome(status, None, stdout, stderr, b"".join(result), time.monotonic() - began, reason)
    return outcome if reason else _ended(outcome, json.loads(answer), limits)


def _out_of_time(clock: Clock) -> tuple[Status, str]:
    """What becomes of a program whose time is up, and why: of one that others kept from running, nothing is known."""
    if clock.own >= clock.limit:
        return "time", f"did not end within {clock.limit:g} s"
    return "infrastructure", f"it waited for a CPU for {clock.waited:.2g} of {clock.elapsed:.2g} s: the machine is busy"


def _too_much(limits: Limits) -> str:
    return f"wrote more than {limits.output_bytes:,} bytes"


def _ended(outcome: Outcome, answer: dict[str, Any], limits: Limits) -> Outcome:
    """The outcome of a program that nobody ended, from the box's answer."""
    if "error" in answer:
        raise BoxError(answer["error"])
    if answer["status"] is None:
        raise BoxLost("the program's first process was killed")
    code = os.waitstatus_to_exitcode(answer["status"])
    if code == -signal.SIGXCPU:
        return replace(outcome, status="time", reason=f"used more than {limits.cpu_seconds} s of CPU time")
    return replace(outcome, exit_code=code)


def _answer(control: socket.socket) -> bytes:
    """The box's message; raises BoxLost when it has ended."""
    try:
        if answer := control.recv(1 << 16):
            return answer
    except OSError as error:
        raise BoxLost(f"the box ended: {error}") from error
    raise BoxLost("the box ended")


def _read(pipe: int, output: bytearray, most: int) -> bool:
    """Appends what there is to read, and at most one byte more than `most` in all; False when there is no more."""
    try:
        part = os.read(pipe, 1 << 16)
    except BlockingIOError:
        return False
    output += part[: max(0, most + 1 - len(output))]
    return bool(part)
