"""Reward terms computed by programs: the sample as JSON on standard input, a verdict as JSON on standard output."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from grpo_mega.config.schema.terms import CommandOptions
from grpo_mega.judges.sandbox import guard
from grpo_mega.platform.trace import span
from grpo_mega.reward.verdict import NoVerdict, Verdict, read_verdict, sample_json
from grpo_mega.types import Sample

MOST_OUTPUT = 1 << 20
"""Largest size of a program's standard output, in bytes."""
SHOWN_CHARACTERS = 1000
"""Number of trailing characters of output shown in an error."""


@dataclass(frozen=True)
class Ended:
    """Result of a program's run.

    Attributes:
        code: Exit code; None when the program was killed because it took too long or printed more than `MOST_OUTPUT`.
        output: Standard output, at most slightly more than `MOST_OUTPUT` bytes.
        errors: End of standard error.
    """

    code: int | None
    output: bytes
    errors: bytes


@dataclass(frozen=True)
class Command:
    """A program that scores samples.

    Attributes:
        options: The command, and how many run at once.
        seconds: Time limit for one run.
    """

    options: CommandOptions
    seconds: float

    def outcomes(self, samples: Sequence[Sample]) -> list[Verdict | Exception]:
        """Verdicts of the program, which runs once for each sample, in a separate process.

        A program that takes too long leaves its sample without a score. One that fails, or prints no verdict, is an
        error.
        """
        with ThreadPoolExecutor(self.options.at_once, "reward worker") as threads:
            return list(threads.map(partial(_outcome, self.options.command, self.seconds), samples))


def _outcome(command: Sequence[str], seconds: float, sample: Sample) -> Verdict | Exception:
    try:
        with span("command"):
            ended = run(command, json.dumps(sample_json(sample)).encode(), seconds)
    # The machine may have no process left, for example. The error belongs to this sample: raised, it would end the
    # others.
    except OSError as error:
        return RuntimeError(f"{command[0]} could not be run: {type(error).__name__}: {error}")
    if len(ended.output) > MOST_OUTPUT:
        return RuntimeError(f"{command[0]} has printed more than {MOST_OUTPUT} bytes{_shown(ended)}")
    if ended.code is None:
        late = f"{command[0]}: no verdict within reward.timeout_seconds={seconds:g}"
        return Verdict(0.0, unscorable=late + _shown(ended))
    if ended.code:
        return RuntimeError(f"{command[0]} ended with exit code {ended.code}{_shown(ended)}")
    try:
        return read_verdict(json.loads(ended.output))
    except NoVerdict as error:
        return ValueError(f"{command[0]} {error}")
    except (ValueError, RecursionError):
        return ValueError(f"{command[0]} has not printed JSON{_shown(ended)}")


def run(command: Sequence[str], given: bytes, seconds: float) -> Ended:
    """Runs a program with `given` on standard input; no process that it started is alive when this returns.

    Must be called by a thread that lives until it returns: the program ends with the thread that has started it.
    """
    # Isolated and without `site`, the guard starts faster, and the user's environment cannot change what it imports.
    guarded = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), *command]
    # A file in memory, as writing to the pipe of a program that reads nothing would block once the pipe is full.
    with os.fdopen(os.memfd_create("sample"), "w+b") as file:
        file.write(given)
        file.seek(0)
        pipe = subprocess.PIPE
        process = subprocess.Popen(guarded, stdin=file, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True)
    with process:
        output, errors, in_time = _read(process, seconds)
        code = process.wait() if in_time else None
        # Leaving the block waits for the guard, which exits only once everything that it guards is dead.
        if not in_time:
            process.send_signal(guard.END)
    return Ended(code, output, errors)


def _read(process: subprocess.Popen[bytes], seconds: float) -> tuple[bytes, bytes, bool]:
    """Reads (output, errors, ended) until a process ends; not `ended` if it exceeds `seconds` or prints too much."""
    assert process.stdout is not None
    assert process.stderr is not None
    output, errors = process.stdout.fileno(), process.stderr.fileno()
    ended = os.pidfd_open(process.pid)
    texts, kept = {output: b"", errors: b""}, {output: 2 * MOST_OUTPUT, errors: 4 * SHOWN_CHARACTERS}
    poll = select.poll()
    for descriptor in (output, errors, ended):
        poll.register(descriptor, select.POLLIN)
    try:
        end = time.monotonic() + seconds
        # `poll` refuses waits of more milliseconds than a C int holds, so long ones are taken in parts.
        while (left := end - time.monotonic()) > 0 and len(texts[output]) <= MOST_OUTPUT:
            ready = [descriptor for descriptor, _ in poll.poll(1000 * min(left, 3600.0))]
            for descriptor in ready:
                if descriptor != ended:
                    part = os.read(descriptor, 1 << 16)
                    texts[descriptor] = (texts[descriptor] + part)[-kept[descriptor] :]
                    if not part:
                        poll.unregister(descriptor)
            # The pidfd stays readable after the end: alone in `ready` it means that both pipes are drained.
            if ready == [ended]:
                return texts[output], texts[errors], True
        return texts[output], texts[errors], False
    finally:
        os.close(ended)


def _shown(ended: Ended) -> str:
    """Last part of the program's output, for an error."""
    streams = {"output": ended.output, "standard error": ended.errors}
    texts = {name: text.decode(errors="replace").strip()[-SHOWN_CHARACTERS:] for name, text in streams.items()}
    return "".join(f"; {name}: {text}" for name, text in texts.items() if text)
