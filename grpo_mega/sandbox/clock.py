"""The clock that ends a program: it stands still while the program waits for a CPU that others have."""

from __future__ import annotations

from grpo_mega.sandbox.processes import Effort, waited

MOST = 2
"""A program gets at most this many times its wall time, however long it waits for a CPU."""


class Clock:
    """How much of its wall time one program has left.

    Attributes:
        limit: Seconds of wall time that it may take.
        elapsed: Seconds since it began, by the clock.
        waited: Seconds of these in which it waited for a CPU.
    """

    def __init__(self, limit: float, before: Effort) -> None:
        """Starts it; `before` is what the box, which may have to wait for a CPU too, has done until then."""
        self.limit = limit
        self.elapsed, self.waited = 0.0, 0.0
        self._last = before

    @property
    def own(self) -> float:
        """Seconds that count: in which the program ran, or waited for something else than a CPU."""
        return self.elapsed - self.waited

    @property
    def left(self) -> float:
        """Seconds until the program is ended, if it has not to wait for a CPU from now on."""
        return min(self.limit - self.own, MOST * self.limit - self.elapsed)

    def look(self, now: Effort) -> None:
        """Counts what the box, and all that the program has started, have waited for since the last look."""
        self.waited = min(max(0.0, self.waited + waited(self._last, now)), self.elapsed)
        self._last = now
