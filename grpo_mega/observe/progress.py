"""Where a run is: its step and its phase, and how long either is likely to last yet."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, median

from grpo_mega.observe.columns import SECONDS, clock

RECENT = 20
"""Steps, and occurrences of a phase, that the time left is read off."""


@dataclass(frozen=True)
class Standing:
    """Where a run is at a moment, as the panel shows it.

    Attributes:
        name: The run's.
        stage: The stage that runs; empty for the last one.
        step: Its finished steps.
        total: Steps that it takes, at most; None where that is not known.
        elapsed: The time of the run so far, in words.
        left: The time that the stage's steps will take yet, in words; empty where that is not known.
        phase: What it does now; empty between phases.
        phase_seconds: The time that the phase has taken in this step.
        phase_share: How much of the phase is done, from 0 to 1; None where that is not known.
        phase_left: Seconds that the phase will take yet; None where that is not known.
        samples: Samples of the phase that are there, and that it needs; (0, 0) for a phase without.
        state: How it ended or when it was last heard of, in words; empty while that is plain to see.
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
    """Counts steps, and the time of phases, of which it is told as they begin and while they go on.

    A phase that others interrupt, as scoring does generation, goes on where it was until the step ends.

    Attributes:
        name: The run's.
        stage: The stage that runs; empty for the last one.
        step: Its finished steps.
        total: Steps that it takes, at most.
        phase: What it does now; empty between phases.
        samples: Samples of the phase that are there, and that it needs; (0, 0) for a phase without.
    """

    def __init__(self, name: str, total: int) -> None:
        """Of a run with so many steps, which begins now."""
        self.name, self.stage, self.step, self.total = name, "", 0, total
        self.phase, self.samples = "", (0, 0)
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self._lasted: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))
        self._spent: dict[str, float] = {}
        self._began = self._since = time.monotonic()

    def enter(self, stage: str, step: int, total: int) -> None:
        """A stage begins, or goes on, after so many of its steps."""
        self.stage, self.step, self.total = stage, step, total
        self._seconds.clear()

    def finish(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is done."""
        self._pause()
        self.step = step
        if metrics.get(SECONDS) is not None:
            self._seconds.append(metrics[SECONDS])
        for phase, seconds in self._spent.items():
            self._lasted[phase].append(seconds)
        self._spent = {}

    def begin(self, phase: str) -> None:
        """A phase begins, or goes on; "" ends the one before."""
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
        """All of it, now."""
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
        """The time that the steps left will take; empty when none was measured."""
        recent = list(self._seconds)
        return clock(fmean(recent) * max(self.total - self.step, 0)) if recent else ""

    @property
    def phase_seconds(self) -> float:
        """The time that the phase has taken in this step."""
        return self._spent.get(self.phase, 0.0) + time.monotonic() - self._since

    @property
    def phase_share(self) -> float | None:
        """How much of the phase is done, from 0 to 1: by its samples, or by what it took in other steps."""
        done, needed = self.samples
        if needed:
            return done / needed
        usual = self._usual()
        return min(self.phase_seconds / usual, 1.0) if usual else None

    @property
    def phase_left(self) -> float | None:
        """Seconds that the phase will take yet, as in other steps or, in the first one, for each sample as until now;
        None where that is not known."""
        seconds, usual, (done, needed) = self.phase_seconds, self._usual(), self.samples
        if usual:
            return usual - seconds if usual > seconds else None
        return seconds * (needed - done) / done if done else None

    def _usual(self) -> float | None:
        lasted = list(self._lasted.get(self.phase, ()))
        return median(lasted) if lasted else None
