"""Time and memory of a step: seconds by phase, throughput, peak memory, and whether a rank is slow.

These values differ between repetitions of a run. A trace has the phases, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import mean, median_low
from typing import NamedTuple

from grpo_mega.platform import trace

APART = ("evaluate", "checkpoint", "export")
"""Phases that are not part of a step; "checkpoint" and "export" belong to all steps before."""
LEARNING = ("update", "sft", "base", "reward_model")
"""Phases in which a model learns; the first one that a step has counts. The last belongs to a reward model's run."""


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

    A phase ends without waiting for work that is still queued on the GPU.
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
        """Measures the body as part of `phase`, inside another one, whose clock is paused meanwhile."""
        outer = self._current
        if outer is None:
            raise ValueError(f"phase {phase!r} interrupts no other phase: call the timer instead")
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
        # After the calls of `on_phase`, whose time belongs to no phase.
        self.beat()
        self._since = _now()

    def _end(self) -> None:
        spent = Seconds(*(now - then for now, then in zip(_now(), self._since, strict=True)))
        assert self._current is not None
        for times in (self._step, self._run):
            before = times.get(self._current, Seconds(0.0, 0.0))
            times[self._current] = Seconds(*(a + b for a, b in zip(before, spent, strict=True)))
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


class Use(NamedTuple):
    """Resources that a rank used in a step."""

    peak_bytes: int
    """Peak memory since the process began."""
    flops: float
    """Floating-point operations of learning in its part of the models (`Model.flops`)."""
    working: float
    """Seconds in which it did not wait for others."""


def step_seconds(spent: Mapping[str, Seconds]) -> dict[str, float]:
    """Wall-clock seconds of a step by phase, and their sum without the phases of `APART`."""
    total = sum(seconds.wall for phase, seconds in spent.items() if phase not in APART)
    return {**{f"time/{phase}": seconds.wall for phase, seconds in spent.items()}, "time/step": total}


def working_seconds(spent: Mapping[str, Seconds]) -> float:
    """Seconds of a step in which this rank did not wait for others."""
    return sum(seconds.wall - seconds.waited for phase, seconds in spent.items() if phase not in APART)


def throughput(tokens: float | None, seconds: Mapping[str, float]) -> dict[str, float]:
    """Tokens per second of a step, sampled and learned from.

    {} if it sampled none, or sampled before the run was stopped and continued, which these seconds do not cover.
    """
    if tokens is None or not seconds.get("time/generate"):
        return {}
    return {"machine/tokens_per_second": tokens / seconds["time/step"]}


def use_of_ranks(uses: Sequence[Use], seconds: Mapping[str, float], peak_tflops: float | None) -> dict[str, float]:
    """Peak memory, learning speed and slowest rank of a step.

    Args:
        uses: Resources of each rank, in order.
        seconds: Seconds of the main rank, see `step_seconds`.
        peak_tflops: Peak of the device of a rank; None if unknown.
    """
    metrics = {"machine/peak_memory_gb": max(use.peak_bytes for use in uses) / 1e9}
    learned = next((seconds[f"time/{phase}"] for phase in LEARNING if seconds.get(f"time/{phase}")), None)
    flops = mean(use.flops for use in uses)
    if learned and flops:
        metrics["machine/tflops"] = flops / learned / 1e12
        if peak_tflops is not None:
            metrics["machine/mfu"] = metrics["machine/tflops"] / peak_tflops
    working = [use.working for use in uses]
    # Of two ranks, the usual median would lie between them and hide half of the difference.
    usual = median_low(working)
    if len(uses) > 1 and usual > 0:
        metrics["machine/straggling"] = max(working) / usual
        metrics["machine/slowest_rank"] = working.index(max(working))
    return metrics
