"""Being asked to stop: SIGTERM and SIGUSR1 are noted, and obeyed between two steps, after saving."""

from __future__ import annotations

import signal
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What schedulers and torchrun send before they kill; torchrun kills 30 seconds later."""


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
