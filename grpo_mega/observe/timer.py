"""Measures the time of a step: seconds by phase, of the wall clock, the processor and waits. A trace has them, too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from grpo_mega.platform import trace


class Seconds(NamedTuple):
    """Time spent in a phase."""

    wall: float
    """Wall-clock seconds."""
    cpu: float
    """Processor seconds of this process, all threads together."""
    waited: float = 0.0
    """Part of the wall-clock seconds in which it waited for other ranks (`trace.waited`)."""


class PhaseTimer:
    """Adds up the time of named phases: `with timer("generate"): ...`.

    A phase ends without waiting for work that is still queued on a GPU.
    """

    def __init__(self, *on_phase: Callable[[str], None]) -> None:
        """Each `on_phase` is called with the phase's name when a phase begins, and at every `beat`."""
        self._on_phase = on_phase
        self._step: dict[str, Seconds] = {}
        self._run: dict[str, Seconds] = {}
        self._current: str | None = None
        self._since = Seconds(0.0, 0.0, 0.0)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Measures the body as part of `phase`. Phases do not nest, so that they add up to the whole."""
        if self._current is not None:
            raise ValueError(f"phase {phase!r} starts inside phase {self._current!r}: end that one first")
        self._begin(phase)
        try:
            with trace.phase(phase):
                yield
        finally:
            self._end()

    @contextmanager
    def instead(self, phase: str) -> Iterator[None]:
        """Measures the body as part of `phase`, in the middle of another one, whose clock is paused meanwhile."""
        outer = self._current
        if outer is None:
            raise ValueError(f"phase {phase!r} interrupts no other phase: begin it by calling the timer")
        self._end()
        self._begin(phase)
        try:
            with trace.phase(phase):
                yield
        finally:
            self._end()
            self._begin(outer)

    def _begin(self, phase: str) -> None:
        self._current = phase
        self.beat()
        self._since = _now()

    def _end(self) -> None:
        spent = Seconds(*(now - then for now, then in zip(_now(), self._since, strict=True)))
        assert self._current is not None
        _add(self._step, self._current, spent)
        _add(self._run, self._current, spent)
        self._current = None

    def beat(self) -> None:
        """Gives a sign of life in the middle of a phase: calls `on_phase` again."""
        if self._current:
            for tell in self._on_phase:
                tell(self._current)

    def step_seconds(self) -> dict[str, Seconds]:
        """Time by phase since the last call, in the order in which phases first began."""
        step, self._step = self._step, {}
        return step

    def totals(self) -> dict[str, Seconds]:
        """Time by phase since the timer was made."""
        return dict(self._run)


def _now() -> Seconds:
    return Seconds(time.perf_counter(), time.process_time(), trace.waited())


def _add(times: dict[str, Seconds], phase: str, spent: Seconds) -> None:
    before = times.get(phase, Seconds(0.0, 0.0))
    times[phase] = Seconds(*(a + b for a, b in zip(before, spent, strict=True)))
