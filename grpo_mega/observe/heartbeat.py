"""Signs of life for whoever watches a run from outside.

A launcher names each rank a file prefix in `GRPO_MEGA_SIGNS`. The rank keeps `PREFIX.beat` up to date, one line with
the number of its signs of life and the phase it is in, and writes `PREFIX.failed` before it says why it ends: earlier
than the ranks that fail because it is gone; or `PREFIX.refused` when it cannot use its input. All ranks go through the
same phases, so the one with the fewest signs is the one the others wait for. Nothing is written when the variable is
not set.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

PREFIX = "GRPO_MEGA_SIGNS"
WIDTH = 63
"""Bytes of a beat: replaced in place, which takes no room and needs no second file."""


class Heartbeat:
    """Called with the name of a phase that begins or has got somewhere: generation, an update of several."""

    def __init__(self) -> None:
        prefix = os.environ.get(PREFIX)
        self._file = os.open(f"{prefix}.beat", os.O_WRONLY | os.O_CREAT, 0o644) if prefix else None
        self._count = 0

    def __call__(self, phase: str) -> None:
        """Notes a sign of life in `phase`."""
        self._count += 1
        if self._file is not None:
            os.pwrite(self._file, f"{self._count} {phase}".ljust(WIDTH).encode() + b"\n", 0)


def mark_failed() -> None:
    """Notes that this rank is about to end over an error."""
    if prefix := os.environ.get(PREFIX):
        Path(f"{prefix}.failed").touch()


def mark_refused(ranks: int, seconds: float) -> None:
    """Notes that this rank cannot use its input, and waits up to `seconds` until all `ranks` have noted that."""
    if prefix := os.environ.get(PREFIX):
        file, deadline = Path(f"{prefix}.refused"), time.monotonic() + seconds
        file.touch()
        while len(list(file.parent.glob("*.refused"))) < ranks and time.monotonic() < deadline:
            time.sleep(0.1)
