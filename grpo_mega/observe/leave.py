"""Ends a rank, before its work is done with an exit code that tells a launcher why.

Training (`grpo_mega.train`) and evaluation (`tools/evaluate.py`) end in the same way, so that one launcher knows both.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from grpo_mega.observe import waiting
from grpo_mega.observe.heartbeat import PREFIX, mark_refused

FAILED = 1
"""Exit code after an unexpected error, or when something called sys.exit; every rank prints the traceback."""
BAD_INPUT = 2
"""Exit code when the configuration, the data or the folder to write to cannot be used."""
ALARMED = 4
"""Exit code after an alarm of `run.stop_on`, when the progress is saved; trying again would end the same way. 3 is what
a Slurm job ends with when its nodes are unfit."""
STOPPED = 75
"""Exit code after SIGTERM or SIGUSR1, when the progress is saved (EX_TEMPFAIL: try again)."""
SECONDS_FOR_OTHERS = 15
"""Seconds that rank 0 waits for the other ranks to meet the same bad input, if a launcher waits for their reports."""
SECONDS_FOR_RANK_0 = 10
"""Seconds that the other ranks then wait for rank 0 to print the error."""


def open_streams() -> None:
    """Gives a process that was started without stdin, stdout or stderr (`2>&-`) an empty one.

    Otherwise the next file that it opens gets the number, and what is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:  # the lowest free number is this one
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115


def refuse(message: str) -> NoReturn:
    """Ends this rank because of bad input. Usually all ranks have the same error, and only rank 0 prints it.

    If another rank ended first, torchrun would end rank 0 before it printed anything. So the others wait until torchrun
    ends them because rank 0 has ended. A rank that is not ended is the only one with the error, and prints it itself.
    """
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    mark_refused(int(os.environ.get("WORLD_SIZE", "1")), SECONDS_FOR_OTHERS)
    if rank != "0":
        time.sleep(SECONDS_FOR_RANK_0)
        message = f"rank {rank}: {message}"
        if PREFIX not in os.environ:  # otherwise `leave` prints it
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


def leave(message: str, code: int) -> NoReturn:
    """Ends this rank and its helper processes at once; rank 0, and each rank with a log of its own, prints the message.

    It does not wait for ranks that may hang in a collective: torchrun ends those.
    """
    try:  # a signal's handler may interrupt a write, and a disk be full: it ends whatever happens
        for helper in multiprocessing.active_children():
            helper.kill()
        waiting.end()
        if os.environ.get("RANK", "0") == "0" or PREFIX in os.environ:
            print(message, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def end_with_code_of(command: Callable[[list[str]], int]) -> NoReturn:
    """Ends this process with the exit code of a command that prints; quietly if nobody reads on, as `| head` does."""
    open_streams()
    try:
        code = command(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at the end
        code = 128 + signal.SIGPIPE
    sys.exit(code)


def finish() -> NoReturn:
    """Ends this rank after its work, without destroying its objects one by one, which takes seconds, or waiting for
    threads."""
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # its work is done, whether or not somebody reads what is flushed
        os._exit(0)
