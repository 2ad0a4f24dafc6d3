"""Measures the pieces of a step, one after the other."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from grpo_mega.colocation.offload import TrainerMemory
from grpo_mega.forecast.rehearsal import world
from grpo_mega.forecast.rehearsal.curve import recorded
from grpo_mega.forecast.rehearsal.device import Books, Waits, frame_in_words, host_bytes

SHOWN_WAITS = 12
"""Places of waits that are reported for each phase."""


class DoesNotFit(Exception):
    """torch's allocator found no memory: this phase and those after it were not rehearsed."""


class Rehearsal:
    """Measures phases one after the other.

    Attributes:
        phases: A row of numbers for each, in bytes and events.
        failure: Where memory ran out: phase, place and torch's message; None when it did not.
        memory: Of the models that there are, whose bytes each phase has by owner.
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
        self._waits.taken()
        world.taken()
        curve: list[int] = []
        try:
            with recorded(curve):
                yield
        except torch.OutOfMemoryError as error:
            self.failure = {"phase": name, "owner": _owner(error), "message": str(error).split(" If reserved")[0]}
        measured = Books.read().since(before)
        places = self._waits.taken()
        self.phases.append(
            {"name": name, "seconds": round(time.monotonic() - began, 2)}
            | _memory()
            | measured
            | {"host": host_bytes() - self._host}
            | {"collectives": world.taken(), "places": dict([*places.items()][:SHOWN_WAITS])}
            | {"curve": curve, "held": self.memory.held() if self.memory else {}}
        )
        if self.failure:
            raise DoesNotFit


def _memory() -> dict[str, int]:
    return {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
    }


def _owner(error: BaseException) -> str:
    """Who asked for the memory: the innermost caller outside of torch."""
    frames = traceback.extract_tb(error.__traceback__)
    named = (frame_in_words(frame.filename, frame.lineno, frame.name) for frame in reversed(frames))
    return next(filter(None, named), "torch's autograd")
