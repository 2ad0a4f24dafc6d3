"""Progress of a run: its step and its phase, and how much longer either is likely to take."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from grpo_mega.observe.waiting import clock
from grpo_mega.show.console.columns import SECONDS, mean

RECENT = 20
"""Number of steps, and of occurrences of a phase, from which the time left is estimated."""


@dataclass(frozen=True)
class Standing:
    """Progress of a run at a moment, as the panel shows it.

    Attributes:
        name: Name of the run.
        stage: The stage that runs; empty for the last one.
        step: Number of finished steps of the stage.
        total: Largest number of steps of the stage; None if unknown.
        elapsed: The time of the run so far, in words.
        left: The time that the stage's remaining steps will take, in words; empty if unknown.
        phase: The phase that runs; empty between phases.
        phase_seconds: Seconds that the phase has taken in this step.
        phase_share: Finished share of the phase, from 0 to 1; None if unknown.
        phase_left: Seconds that the phase will still take; None if unknown.
        samples: Number of finished samples of the phase, and number that it needs; (0, 0) for a phase without samples.
        state: How the run ended or when it last gave a sign of life, in words; empty while the run shows it itself.
    """

    name: str
    stage: str
    step: int
    total: int | None
    elapsed: str
    left: str
    phase: str = ""
    phase_seconds: float = 0.0
    phase_share: float | None = None
    phase_left: float | None = None
    samples: tuple[int, int] = (0, 0)
    state: str = ""


class Progress:
    """Counts steps, and measures the time of phases, which are reported here as they begin and while they go on.

    A phase that another one interrupts, as scoring interrupts generation, goes on counting when it comes again.

    Attributes:
        name: Name of the run.
        stage: The stage that runs; empty for the last one.
        step: Number of finished steps of the stage.
        total: Largest number of steps of the stage.
        phase: The phase that runs; empty between phases.
        samples: Number of finished samples of the phase, and number that it needs; (0, 0) for a phase without samples.
    """

    def __init__(self, name: str, total: int) -> None:
        """Begins now, for a run of `total` steps."""
        self.name, self.stage, self.step, self.total = name, "", 0, total
        self.phase, self.samples = "", (0, 0)
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self._lasted: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))
        self._spent: dict[str, float] = {}
        self._began = self._since = time.monotonic()

    def enter(self, stage: str, step: int, total: int) -> None:
        """Begins a stage of at most `total` steps, or continues it after `step` of them."""
        self.stage, self.step, self.total = stage, step, total
        self._seconds.clear()

    def finish(self, step: int, metrics: Mapping[str, float]) -> None:
        """Counts a finished step."""
        self._pause()
        self.step = step
        if metrics.get(SECONDS) is not None:
            self._seconds.append(metrics[SECONDS])
        for phase, seconds in self._spent.items():
            self._lasted[phase].append(seconds)
        self._spent = {}

    def begin(self, phase: str) -> None:
        """Begins or continues a phase; "" ends the one before."""
        if phase != self.phase:
            self._pause()
            self.phase, self.samples = phase, (0, 0)

    def _pause(self) -> None:
        now = time.monotonic()
        if self.phase:
            self._spent[self.phase] = self._spent.get(self.phase, 0.0) + now - self._since
        self._since = now

    @property
    def standing(self) -> Standing:
        """The progress at this moment."""
        return Standing(
            self.name, self.stage, self.step, self.total, self.elapsed, self.left, self.phase, self.phase_seconds,
            self.phase_share, self.phase_left, self.samples,
        )  # fmt: skip

    @property
    def elapsed(self) -> str:
        """The time of the run so far, in words."""
        return clock(time.monotonic() - self._began)

    @property
    def left(self) -> str:
        """The time that the remaining steps will take, in words; empty if no step was measured."""
        recent = list(self._seconds)
        return clock(mean(recent) * max(self.total - self.step, 0)) if recent else ""

    @property
    def phase_seconds(self) -> float:
        """The time that the phase has taken in this step."""
        return self._spent.get(self.phase, 0.0) + time.monotonic() - self._since

    @property
    def phase_share(self) -> float | None:
        """Finished share of the phase, from 0 to 1, by its samples or its duration in other steps; None if unknown."""
        done, needed = self.samples
        if needed:
            return done / needed
        usual = self._usual()
        return min(self.phase_seconds / usual, 1.0) if usual else None

    @property
    def phase_left(self) -> float | None:
        """Seconds that the phase will still take, by other steps or, in the first, by its samples; None if unknown."""
        seconds, usual, (done, needed) = self.phase_seconds, self._usual(), self.samples
        if usual:
            return usual - seconds if usual > seconds else None
        return seconds * (needed - done) / done if done else None

    def _usual(self) -> float | None:
        lasted = list(self._lasted.get(self.phase, ()))
        return median(lasted) if lasted else None
