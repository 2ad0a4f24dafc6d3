"""Wall-clock limit of a program that does not count the time it waits for a CPU used by others."""

from __future__ import annotations

from grpo_mega.judges.sandbox.processes import Effort, waited

MOST = 2
"""Upper bound on a program's wall time, as a multiple of its limit, however long it waits for a CPU."""


class Clock:
    """Remaining wall time of one program.

    Attributes:
        limit: Seconds of wall time that the program may take.
        elapsed: Seconds of wall time since it began.
        waited: Seconds of `elapsed` in which it waited for a CPU.
    """

    def __init__(self, limit: float, before: Effort) -> None:
        """Starts the clock; `before` is the effort of the box (which may wait for a CPU too) up to now."""
        self.limit = limit
        self.elapsed, self.waited = 0.0, 0.0
        self._last = before

    @property
    def own(self) -> float:
        """Seconds that count against the limit: running, or waiting for anything but a CPU."""
        return self.elapsed - self.waited

    @property
    def left(self) -> float:
        """Seconds until the program is ended, provided that it does not wait for a CPU from now on."""
        return min(self.limit - self.own, MOST * self.limit - self.elapsed)

    def look(self, now: Effort) -> None:
        """Adds the time that the box and the program's processes waited for a CPU since the last call."""
        self.waited = min(max(0.0, self.waited + waited(self._last, now)), self.elapsed)
        self._last = now
