"""What a rank tells its launcher: signs of life while it works, and with which exit code it ends.

A launcher that watches the ranks gives each a file prefix in `GRPO_MEGA_SIGNS`. The rank keeps `PREFIX.beat` up to
date, one line with the count of its signs of life and its current phase. It writes `PREFIX.failed` before it prints why
it ends, and so earlier than the ranks that fail because it has ended; a rank that ends because others told it of their
errors writes `elsewhere` into that file. It writes `PREFIX.refused` when it cannot use its input. All ranks have the
same phases, so the others wait for the one with the fewest signs. Without the variable nothing is written.

Training (`grpo_mega.train`) and evaluation (`tools/evaluate.py`) end in the same way, so that one launcher knows both.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from grpo_mega.observe import waiting
from grpo_mega.platform.stop import FailedElsewhere

PREFIX = "GRPO_MEGA_SIGNS"
WIDTH = 63
"""Bytes of a beat without its newline; a fixed size, so that it is overwritten in place and needs no second file."""
FAILED = 1
"""Exit code after an unexpected error, or when something called sys.exit; every rank prints the traceback."""
BAD_INPUT = 2
"""Exit code when the configuration, the data or the folder to write to cannot be used."""
ALARMED = 4
"""Exit code after an alarm of `run.stop_on`, when the progress is saved; trying again would end the same way. 3 is the
exit code of a Slurm job with unfit nodes."""
STOPPED = 75
"""Exit code after SIGTERM or SIGUSR1, when the progress is saved (EX_TEMPFAIL: try again)."""
SECONDS_FOR_OTHERS = 15
"""Seconds that rank 0 waits for the other ranks to meet the same bad input, if a launcher waits for their reports."""
SECONDS_FOR_RANK_0 = 10
"""Seconds that the other ranks then wait for rank 0 to print the error."""


class Heartbeat:
    """Counts signs of life; called with the name of a phase that begins or makes progress, such as generation."""

    def __init__(self) -> None:
        prefix = os.environ.get(PREFIX)
        self._file = os.open(f"{prefix}.beat", os.O_WRONLY | os.O_CREAT, 0o644) if prefix else None
        self._count = 0

    def __call__(self, phase: str) -> None:
        """Writes a sign of life in `phase`."""
        self._count += 1
        if self._file is not None:
            os.pwrite(self._file, f"{self._count} {phase}".ljust(WIDTH).encode() + b"\n", 0)


def mark_failed(error: BaseException) -> bool:
    """Writes `PREFIX.failed`: this rank is about to end with `error`. Returns whether other ranks told it of theirs."""
    cause: BaseException | None = error
    while cause and not isinstance(cause, FailedElsewhere):
        cause = cause.__cause__
    if prefix := os.environ.get(PREFIX):
        Path(f"{prefix}.failed").write_text("elsewhere\n" if cause else "")
    return cause is not None


def mark_refused(ranks: int, seconds: float) -> None:
    """Writes `PREFIX.refused`: this rank cannot use its input. Waits up to `seconds` for all `ranks` to write it."""
    if prefix := os.environ.get(PREFIX):
        file, deadline = Path(f"{prefix}.refused"), time.monotonic() + seconds
        file.touch()
        while len(list(file.parent.glob("*.refused"))) < ranks and time.monotonic() < deadline:
            time.sleep(0.1)


def open_streams() -> None:
    """Gives a process that was started without stdin, stdout or stderr (`2>&-`) an empty one.

    Otherwise the next file that it opens gets that number, and with it everything printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # os.open takes the lowest free number, which is this one.
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115


def refuse(message: str) -> NoReturn:
    """Ends this rank because of bad input. Usually all ranks have the same error, and only rank 0 prints it.

    If another rank ended first, torchrun would kill rank 0 before it printed anything. So the others wait to be killed
    after rank 0 has ended. A rank that survives the wait is the only one with the error, and prints it itself.
    """
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        # A run handles SIGTERM in order to save its progress; here torchrun must be able to end the wait with it.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    mark_refused(int(os.environ.get("WORLD_SIZE", "1")), SECONDS_FOR_OTHERS)
    if rank != "0":
        time.sleep(SECONDS_FOR_RANK_0)
        message = f"rank {rank}: {message}"
        # With a launcher that watches the ranks, `leave` prints it.
        if PREFIX not in os.environ:
            print(message, file=sys.stderr)
    leave(message, BAD_INPUT)


@contextmanager
def refusing_options() -> Iterator[None]:
    """Context in which bad options, for which argparse ends the process, are marked as refused input."""
    try:
        yield
    except SystemExit as end:
        if end.code:
            mark_refused(int(os.environ.get("WORLD_SIZE", "1")), SECONDS_FOR_OTHERS)
        raise


def leave(message: str, code: int, reason: str | None = None) -> NoReturn:
    """Ends this rank and its helper processes at once; rank 0, and each rank with its own log, prints the message.

    It does not wait for ranks that may hang in a collective: torchrun ends those. torchrun is told the `reason`, by
    default the message; "" for a rank that is not the cause.
    """
    # A signal handler may have interrupted a write, and the disk may be full: os._exit must happen anyway.
    try:
        for helper in multiprocessing.active_children():
            helper.kill()
        waiting.end()
        if os.environ.get("RANK", "0") == "0" or PREFIX in os.environ:
            print(message, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        # torchrun ends with a long traceback of its own, and prints what it finds in this file below it.
        reason = message if reason is None else reason
        if reason and (file := os.environ.get("TORCHELASTIC_ERROR_FILE")):
            told = {"message": reason, "extraInfo": {"timestamp": str(int(time.time()))}}
            Path(file).write_text(json.dumps({"message": told}))
    finally:
        os._exit(code)


def end_with_code_of(command: Callable[[list[str]], int]) -> NoReturn:
    """Ends this process with the exit code of a command that prints; quietly if the reader stops early, like `head`."""
    open_streams()
    try:
        code = command(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    sys.exit(code)


def finish(code: int = 0) -> NoReturn:
    """Ends this rank after its work, without destroying its objects, which takes seconds, and without waiting for
    threads, such as gloo's: one that outlives the interpreter can abort the process."""
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        # The work is done, even if the output can no longer be written.
        os._exit(code)
