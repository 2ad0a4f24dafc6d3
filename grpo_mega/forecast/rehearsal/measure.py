"""Measures the pieces of a step, one after the other: time, memory, launches, waits, collectives."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import torch

from grpo_mega.colocation.offload import TrainerMemory
from grpo_mega.forecast.rehearsal import world
from grpo_mega.forecast.rehearsal.device import Books, Waits, frame_in_words, host_bytes

SHOWN_WAITS = 12
"""Places of waits that are reported for each phase."""
MEMORY = {
    "allocated": "memory_allocated",
    "reserved": "memory_reserved",
    "peak_allocated": "max_memory_allocated",
    "peak_reserved": "max_memory_reserved",
}
"""Number of a phase -> function of torch.cuda that reads it."""
POINTS = 150
"""Largest number of values in a curve of memory."""
EVENTS = 1 << 22
"""Largest number of a phase's events that torch keeps."""


class DoesNotFit(Exception):
    """torch's allocator ran out of memory: this phase is incomplete, and later ones were not rehearsed."""


class Rehearsal:
    """Measures phases one after the other.

    Attributes:
        phases: A row of numbers for each, in bytes and events.
        failure: Where memory ran out: phase, place and torch's message; None when it did not.
        memory: Memory of the models that are built; each phase has their bytes by owner.
    """

    def __init__(self) -> None:
        self.phases: list[dict[str, Any]] = []
        self.failure: dict[str, str] | None = None
        self.memory: TrainerMemory | None = None
        self._waits = Waits()
        self._host = host_bytes()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts what happens within. Raises DoesNotFit when memory runs out."""
        before, began = Books.read(), time.monotonic()
        torch.cuda.reset_peak_memory_stats()
        # What was counted between phases belongs to none: both calls discard it.
        self._waits.taken()
        world.taken()
        curve: list[int] = []
        try:
            with recorded(curve):
                yield
        except torch.OutOfMemoryError as error:
            # Who asked for the memory: the innermost caller outside of torch.
            frames = reversed(traceback.extract_tb(error.__traceback__))
            callers = (frame_in_words(frame.filename, frame.lineno, frame.name) for frame in frames)
            owner = next(filter(None, callers), "torch's autograd")
            # torch's message ends with advice about fragments, which is of no use to a rehearsal.
            self.failure = {"phase": name, "owner": owner, "message": str(error).split(" If reserved")[0]}
        # The row is written after a failure as well: it shows how far memory rose.
        measured = Books.read().since(before)
        places = self._waits.taken()
        self.phases.append(
            {"name": name, "seconds": round(time.monotonic() - began, 2)}
            | {name: getattr(torch.cuda, call)() for name, call in MEMORY.items()}
            | measured
            | {"host": host_bytes() - self._host}
            | {"collectives": world.taken(), "places": dict([*places.items()][:SHOWN_WAITS])}
            | {"curve": curve, "held": self.memory.held() if self.memory else {}}
        )
        if self.failure:
            raise DoesNotFit


@contextmanager
def recorded(curve: list[int]) -> Iterator[None]:
    """Extends `curve` with the allocated bytes over the body, as `curve_of` gives them."""
    begin = torch.cuda.memory_allocated()
    # Without stack traces, which would take longer than the phase.
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=EVENTS)
    try:
        yield
    finally:
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        torch.cuda.memory._record_memory_history(enabled=None)
        curve += curve_of(events, begin)


def curve_of(events: Iterable[Mapping[str, Any]], begin: int, points: int = POINTS) -> list[int]:
    """Allocated bytes at the beginning, the maximum over each of `points` equal stretches of events, and at the end.

    Events have the requested bytes; torch allocates multiples of 512 bytes, a thousandth more in all.

    Args:
        events: torch's records, "action" and "size" of each.
        begin: Bytes before the first.
        points: Parts that the events are cut into.
    """
    # Allocated bytes fall when a tensor is freed; "free_completed" may come later, after other streams have used it.
    signs = {"alloc": 1, "free_requested": -1}
    changes = [signs[event["action"]] * event["size"] for event in events if event["action"] in signs]
    levels = [*accumulate(changes, initial=begin)]
    parts = min(points, len(levels))
    edges = [number * len(levels) // parts for number in range(parts + 1)]
    return [begin, *(max(levels[first:after]) for first, after in pairwise(edges)), levels[-1]]
