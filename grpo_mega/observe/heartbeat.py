"""Signs of life for a launcher that watches the ranks of a run.

A launcher gives each rank a file prefix in `GRPO_MEGA_SIGNS`. The rank keeps `PREFIX.beat` up to date, one line with
the count of its signs of life and its current phase. It writes `PREFIX.failed` before it prints why it ends, and so
earlier than the ranks that fail because it has ended; a rank that ends because others told it of their errors writes
`elsewhere` into that file. It writes `PREFIX.refused` when it cannot use its input. All ranks have the same phases, so
the others wait for the one with the fewest signs. Nothing is written when the variable is not set.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from grpo_mega.platform.stop import FailedElsewhere

PREFIX = "GRPO_MEGA_SIGNS"
WIDTH = 63
"""Bytes of a beat without its newline; a fixed size, so that it is overwritten in place and needs no second file."""


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


def mark_failed(error: BaseException) -> None:
    """Writes `PREFIX.failed`: this rank is about to end with `error`, which may be that of other ranks."""
    if prefix := os.environ.get(PREFIX):
        Path(f"{prefix}.failed").write_text("elsewhere\n" if _is_of_others(error) else "")


def _is_of_others(error: BaseException | None) -> bool:
    while error and not isinstance(error, FailedElsewhere):
        error = error.__cause__
    return error is not None


def mark_refused(ranks: int, seconds: float) -> None:
    """Writes `PREFIX.refused`: this rank cannot use its input. Waits up to `seconds` for all `ranks` to write it."""
    if prefix := os.environ.get(PREFIX):
        file, deadline = Path(f"{prefix}.refused"), time.monotonic() + seconds
        file.touch()
        while len(list(file.parent.glob("*.refused"))) < ranks and time.monotonic() < deadline:
            time.sleep(0.1)
