"""History of a run for its alarms; its size is bounded, whatever the length of the run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

REMEMBERED = 64
"""Lines of latest steps that are kept."""
WINDOW = 10
"""Steps of most means."""

Line = Mapping[str, float | None]
"""The metrics of a step; None for one that is not finite."""


class Evaluation(NamedTuple):
    """A result on the validation problems, together with that of training at that time."""

    accuracy: float
    reward: float | None
    """The mean training reward over the latest `WINDOW` steps, or over all steps if they are fewer."""


@dataclass
class History:
    """History of a run for its alarms, of bounded size.

    Attributes:
        first: The lines of the first `WINDOW` steps.
        recent: The lines of the latest `REMEMBERED` steps.
        best: Means of the rewards over the `WINDOW` steps with the highest accuracy so far; empty before.
        best_evaluation: The evaluation with the highest accuracy so far; of equal ones, the first.
        evaluations: The latest two evaluations.
        rewarded: Whether a completion of any step was right.
        hacking: Whether the latest evaluation that says so has seen a reward model being gamed.
    """

    first: list[Line] = field(default_factory=list)
    recent: deque[Line] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    best: dict[str, float] = field(default_factory=dict)
    best_evaluation: Evaluation | None = None
    evaluations: deque[Evaluation] = field(default_factory=lambda: deque(maxlen=2))
    rewarded: bool = False
    hacking: bool = False

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Adds the metrics of the next step; values that are not numbers are left out, infinite ones become None."""
        line: dict[str, float | None] = {}
        for name, value in metrics.items():
            if value is None:
                line[name] = None
            elif isinstance(value, int | float):
                # Numbers beyond 1e300 count as infinite, as a sum of a few of them would be.
                line[name] = float(value) if abs(value) < math.inf and abs(value) <= 1e300 else None
        self.recent.append(line)
        if len(self.first) < WINDOW:
            self.first.append(line)
        self.rewarded |= (line.get("reward/accuracy") or 0) > 0
        accuracy = self.mean("reward/accuracy")
        if accuracy is not None and accuracy > self.best.get("reward/accuracy", -math.inf):
            means = {name: self.mean(name) for name in line if name.startswith("reward/")}
            self.best = {name: mean for name, mean in means.items() if mean is not None}
        self.hacking = bool(line.get("eval/hacking", self.hacking))
        if (validated := line.get("eval/accuracy")) is not None:
            rewards = self.latest("reward/mean", WINDOW)
            evaluation = Evaluation(validated, mean_of(rewards, len(rewards)) if rewards else None)
            self.evaluations.append(evaluation)
            if self.best_evaluation is None or validated > self.best_evaluation.accuracy:
                self.best_evaluation = evaluation

    @property
    def now(self) -> Line:
        """The line of the latest step; empty before the first."""
        return self.recent[-1] if self.recent else {}

    def latest(self, name: str, count: int) -> list[float]:
        """The latest `count` finite values of a metric, oldest first; all of them when they are fewer."""
        return _values(self.recent, name)[-count:]

    def together(self, first: str, second: str, count: int) -> list[tuple[float, float]]:
        """The values of two metrics in the latest `count` steps that have both, oldest first."""
        pairs = ((line.get(first), line.get(second)) for line in self.recent)
        return [(one, other) for one, other in pairs if one is not None and other is not None][-count:]

    def mean(self, name: str, count: int = WINDOW) -> float | None:
        """The mean of the latest `count` values of a metric; None when there are fewer."""
        return mean_of(self.latest(name, count), count)

    def median(self, name: str, count: int) -> float | None:
        """The median of the latest `count` values of a metric; None when there are fewer."""
        values = self.latest(name, count)
        return median(values) if len(values) == count else None

    def of_first(self, name: str) -> float | None:
        """The mean of a metric over the first `WINDOW` steps; None when one of them has none."""
        return mean_of(_values(self.first, name), WINDOW)


def _values(lines: Iterable[Line], name: str) -> list[float]:
    return [value for line in lines if (value := line.get(name)) is not None]


def mean_of(values: list[float], count: int) -> float | None:
    """The mean of `count` values; None when `values` has fewer."""
    return sum(value / count for value in values) if len(values) == count else None
