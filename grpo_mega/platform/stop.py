"""Being asked to stop: SIGTERM and SIGUSR1 are noted, and obeyed between two steps, after saving."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What schedulers and torchrun send before they kill; torchrun kills 30 seconds later."""


@contextmanager
def shielded_children() -> Iterator[None]:
    """Processes started inside never see the signals that ask this one to stop.

    Megatron writes checkpoints through helper processes that live as long as the run. Schedulers and torchrun signal
    whole process groups: without a shield the helpers die at once, and the last checkpoint cannot be written.
    """
    resource_tracker.ensure_running()  # when Python starts it later, it unblocks the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*SIGNALS, signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Stopped(Exception):
    """The run saved a checkpoint and stopped because it was asked to."""


class StopRequest:
    """Whether this process was asked to stop."""

    def __init__(self) -> None:
        """Takes over the signals for the rest of the process."""
        self.received: str | None = None
        for number in SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received = signal.Signals(number).name
