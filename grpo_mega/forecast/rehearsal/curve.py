"""Memory of torch's allocator over a phase, from its own record of what is asked for and given back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch

POINTS = 150
"""Most values that a curve is reported by."""
EVENTS = 1 << 22
"""Most events of a phase that are kept."""


@contextmanager
def recorded(curve: list[int]) -> Iterator[None]:
    """Puts the allocated bytes over what happens within, as `curve_of` gives them, into `curve`."""
    begin = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=EVENTS)
    try:
        yield
    finally:
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        torch.cuda.memory._record_memory_history(enabled=None)
        curve += curve_of(events, begin)


def curve_of(events: Iterable[Mapping[str, Any]], begin: int, points: int = POINTS) -> list[int]:
    """Allocated bytes at the beginning, the most within each of `points` equal numbers of events, and at the end.

    The records have what is asked for; what is given is a multiple of 512 bytes, a thousandth more in all.

    Args:
        events: torch's records, "action" and "size" of each.
        begin: Bytes before the first.
        points: Parts that the events are cut into.
    """
    signs = {"alloc": 1, "free_requested": -1}
    changes = [signs[event["action"]] * event["size"] for event in events if event["action"] in signs]
    levels = [*accumulate(changes, initial=begin)]
    return [begin, *(max(part) for part in _parts(levels, points)), levels[-1]]


def _parts(levels: Sequence[int], parts: int) -> Iterator[Sequence[int]]:
    """Cuts a list into as many parts of equal lengths as it has room for."""
    parts = min(parts, len(levels))
    for number in range(parts):
        yield levels[number * len(levels) // parts : (number + 1) * len(levels) // parts]
