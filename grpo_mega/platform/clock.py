"""One clock for all ranks: the main rank's wall clock as read when the run began, advanced by monotonic clocks.

Processes of a machine share its monotonic clock. Between machines the offset of two such clocks is measured as in NTP:
a rank asks the main one for the time, several times, and uses the fastest answer. The error is at most half of that
round trip, plus later drift: microseconds an hour between machines synchronised by NTP or PTP, tens of milliseconds
between others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

QUESTIONS = 16
"""Number of time requests from each other machine to the main rank."""


@dataclass(frozen=True)
class Clock:
    """Clock of the common time.

    Attributes:
        origin: Nanoseconds between this machine's monotonic clock and the common one.
        error_us: Bound on the measurement error relative to the main rank's clock, in microseconds; 0 on its machine.
    """

    origin: int
    error_us: float = 0.0

    def microseconds(self, at: int | None = None) -> float:
        """Common time, in microseconds since 1970, of a `time.perf_counter_ns` value; by default of now."""
        return (self.origin + (time.perf_counter_ns() if at is None else at)) / 1e3


def own_clock() -> Clock:
    """A clock of this process only."""
    return Clock(time.time_ns() - time.perf_counter_ns())


def shared_clock(read: Callable[[], int] = time.perf_counter_ns, machine: str | None = None) -> Clock:
    """The clock of all ranks; every rank must call it.

    Args:
        read: This machine's monotonic clock, in nanoseconds.
        machine: Identity of the machine; by default the id of its kernel's boot.
    """
    import torch.distributed as dist

    from grpo_mega.platform.collectives import from_all_ranks, from_main_rank

    # The wall clock is read once, on one rank: later steps of it by NTP must not reorder events.
    origin = from_main_rank(lambda: time.time_ns() - read())
    machines = from_all_ranks(lambda: machine or Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    mine: tuple[int, float] = (0, 0.0)
    # The first rank of every other machine measures, one machine after the other, as the main rank answers one at a
    # time. Ranks of one machine share its clock and so the result.
    for name in dict.fromkeys(machines):
        first = machines.index(name)
        if first and dist.get_rank() in (0, first):
            mine = _distance(first, read)
    distance, error_us = from_all_ranks(lambda: mine)[machines.index(machines[dist.get_rank()])]
    return Clock(origin + distance, error_us)


def _distance(other: int, read: Callable[[], int]) -> tuple[int, float]:
    """Offset of rank `other`'s clock from the main rank's in nanoseconds, and half of the round trip in microseconds.

    On the main rank, which answers, both are 0.
    """
    import torch
    import torch.distributed as dist

    from grpo_mega.platform.collectives import host_group

    message, group = torch.zeros(1, dtype=torch.int64), host_group()
    measured = []
    for _ in range(QUESTIONS):
        if dist.get_rank() == 0:
            dist.recv(message, other, group)
            message[0] = read()
            dist.send(message, other, group)
        else:
            asked = read()
            dist.send(message, 0, group)
            dist.recv(message, 0, group)
            answered = read()
            # The main rank read its clock between the two times; half way is the best guess, wrong by half the trip at
            # most.
            measured.append((answered - asked, int(message) - (asked + answered) // 2))
    # The fastest round trip bounds the error best.
    trip, distance = min(measured, default=(0, 0))
    return distance, trip / 2e3
