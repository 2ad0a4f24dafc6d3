"""Handles SIGTERM, SIGUSR1 and Ctrl-C: the run saves and stops at the next point at which no work is lost.

Before the first update of a GRPO step, the step is abandoned; the next start runs it again with the same samples. After
that, the update in progress is finished, and the rest of the step is saved with the checkpoint. Between the signal
and the end of the run there are at most

- what an environment's `reset` and its replies take;
- in generation, the reading of the prompts of one wave and `rollout.engine.STEPS_PER_POLL` decode steps;
- the rewards of one step, one pass of log-probs or one optimizer update, when the signal arrives during one of them;
- the checkpoint, if that of the current state is not written yet.

A signal that reaches only one rank stops all ranks as quickly. A second Ctrl-C ends the run at once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that schedulers and torchrun send before they kill; torchrun kills 30 seconds later, also after Ctrl-C."""


@contextmanager
def shielded_children() -> Iterator[None]:
    """Context whose child processes do not receive the signals that ask this process to stop.

    Megatron writes checkpoints through helper processes that live as long as the run. Schedulers and torchrun signal
    whole process groups: without this the helpers die at once, and the last checkpoint cannot be written.
    """
    # Started now: if Python starts the tracker inside the block, it unblocks the signals afterwards.
    resource_tracker.ensure_running()
    # Children inherit the mask. A signal to this process inside the block is not lost: it is delivered when the block
    # ends.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*SIGNALS, signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Interrupted(Exception):
    """Work was abandoned on every rank, because some rank was asked to stop."""


class Stopped(Exception):
    """The run saved a checkpoint and stopped because it was asked to."""


class StoppedByAlarm(Exception):
    """The run saved a checkpoint and stopped because of an alarm; the same command would stop again."""


class StopRequest:
    """Whether this process was asked to stop."""

    def __init__(self) -> None:
        """Starts without a request; signals are handled only after `listen`."""
        self.received: str | None = None

    def listen(self) -> None:
        """Handles the signals from now on: the first one is recorded and prints a message, the others are ignored.

        After Ctrl-C, another one raises KeyboardInterrupt.
        """
        for number in (*SIGNALS, signal.SIGINT):
            signal.signal(number, self._record)

    def asked(self) -> bool:
        """Whether one of the signals was received."""
        return self.received is not None

    def _record(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT:
            # The second Ctrl-C then raises KeyboardInterrupt wherever the program is.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.received is None:
            name, rank = signal.Signals(number).name, os.environ.get("RANK", "0")
            again = "; another Ctrl-C ends it at once" if number == signal.SIGINT else ""
            # Not through sys.stderr: the handler may run in the middle of one of its writes, which is not reentrant.
            with suppress(OSError):
                os.write(2, f"rank {rank}: {name} received, stopping where no work is lost{again}\n".encode())
            self.received = name


class FailedOutside(RuntimeError):
    """The user's code or service failed. The message has its stack trace, which ours would only obscure."""


class FailedElsewhere(Exception):
    """Cause of an error on a rank whose own work succeeded: the work failed on other ranks."""
