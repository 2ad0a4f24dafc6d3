"""Compares the planner's prediction of a step with the run's measurements, once: a line of the log, and planned.json.

Planning pretends process groups, so a separate process does it (`compare.py`); no step waits for it. It receives the
measured lengths of completions.
"""

from __future__ import annotations

import json
import logging
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from grpo_mega.observe.recorder import Observer
from grpo_mega.observe.run_dir import PLANNED
from grpo_mega.observe.timer import APART
from grpo_mega.platform.orphans import start_beside

CONFIG = "config.yaml"
LOG = Path("logs") / "planned.log"
"""Log of the planner in the run directory: why planned.json is missing."""
COMPARED = 2
"""Number of steps whose mean is compared: the first whole steps after the very first, in which libraries start."""
PATIENCE = 60.0
"""Seconds that a finished run waits for the planner before it writes its summary."""

logger = logging.getLogger(__name__)


class Prediction(Observer):
    """Compares the first whole steps of this start of a run, in its last stage, with their plan."""

    at_the_end = "planner"

    def __init__(self, path: Path, gpus: int, vocab_size: int, prompt: float, allocator: bool) -> None:
        """Prepares to take the steps of the run in directory `path`.

        Args:
            path: The run directory, whose config.yaml is planned.
            gpus: Number of GPUs of the run.
            vocab_size: Tokens of its model.
            prompt: Mean tokens of its prompts.
            allocator: Whether machine/peak_memory_gb is memory of torch's allocator, as the plan's is.
        """
        self._path, self._allocator = path, allocator
        self._of_the_run = {"gpus": gpus, "vocab_size": vocab_size, "prompt": prompt}
        self._seen = 0
        self._steps: dict[int, Mapping[str, float]] = {}
        self._planner: subprocess.Popen[bytes] | None = None
        self._over, self._last = False, False

    def stage(self, name: str, step: int, steps: int) -> None:
        """Remembers whether this is the last stage, the only one that is compared."""
        self._last = not name

    def step(self, step: int, metrics: dict[str, float], shown: Sequence[dict[str, Any]] = ()) -> None:
        """Takes a finished step; reports the comparison once, at the first step after the planner has ended."""
        if not self._last:
            return
        self._seen += 1
        # A whole step sampled and learned in this start alone, without an evaluation.
        whole = {"time/generate", "time/update"} <= metrics.keys() and "time/evaluate" not in metrics
        if self._planner is None and not self._over and self._seen > 1 and whole:
            self._steps[step] = metrics
            if len(self._steps) == COMPARED:
                self._begin()
        if self._planner and self._planner.poll() is not None:
            self._say_result()

    def finish(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Waits for the planner, reports the comparison unless a step has; returns `result`."""
        try:
            if self._planner:
                self._planner.wait(PATIENCE)
                self._say_result()
        except subprocess.TimeoutExpired:
            logger.warning("the planner takes longer than the run: no comparison of plan and run")
            self.close()
        return self.result()

    def close(self) -> None:
        """Ends the planner."""
        if self._planner:
            self._planner.kill()
            self._planner.wait()
            self._planner = None

    def result(self) -> dict[str, Any]:
        """{"planned": the comparison} for the summary; {} if neither this start nor an earlier one made it."""
        file = self._path / PLANNED
        try:
            return {"planned": json.loads(file.read_text())} if file.exists() else {}
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be read: %s; the summary lacks the plan", file, error)
            return {}

    def _begin(self) -> None:
        names = dict.fromkeys(
            name.removeprefix("time/") for m in self._steps.values() for name in m if name.startswith("time/")
        )
        measured = self._of_the_run | {
            "steps": [*self._steps],
            "completion": self._mean("rollout/length_mean"),
            "signal": self._mean("rollout/groups_with_signal", otherwise=1.0),
            "seconds": {name: self._mean(f"time/{name}") for name in names if name not in APART},
            "peak": 1e9 * max(m["machine/peak_memory_gb"] for m in self._steps.values()) if self._allocator else None,
        }
        # Tried once in a start, whether or not the planner can be started.
        self._over = True
        try:
            # The file of an earlier start must not be reported as this one's if the planner fails.
            (self._path / PLANNED).unlink(missing_ok=True)
            words: list[str | Path] = [self._path / CONFIG, json.dumps(measured), self._path / PLANNED]
            self._planner = start_beside("grpo_mega.forecast.planning.compare", words, self._path / LOG)
        except OSError as error:
            logger.warning("no comparison of plan and run: %s", error)

    def _mean(self, name: str, otherwise: float = 0.0) -> float:
        return mean(metrics.get(name, otherwise) for metrics in self._steps.values())

    def _say_result(self) -> None:
        assert self._planner
        code, self._planner = self._planner.returncode, None
        if code == 0:
            self.say(comparison_line(self.result()["planned"]))
        else:
            logger.warning("no comparison of plan and run: see %s", self._path / LOG)


def comparison_line(compared: Mapping[str, Any]) -> str:
    """One line with seconds by phase and memory, planned and measured, from the content of planned.json."""
    steps, gpus = " and ".join(map(str, compared["steps"])), f"{compared['gpus']} {compared['gpu'].upper()}"
    seconds = ", ".join(
        f"{name} {_figure(measured)} ({_figure(planned)})"
        for name, (planned, measured) in compared["seconds"].items()
        if planned is not None
    )
    planned, measured = compared["memory"]
    memory = f"; memory {measured / 1e9:.1f} GB ({planned / 1e9:.1f})" if measured is not None else ""
    return f"seconds of steps {steps} as measured (as planned for {gpus}): {seconds}{memory}"


def _figure(seconds: float | None) -> str:
    return "none" if seconds is None else f"{seconds:.3g}" if seconds < 100 else f"{seconds:,.0f}"
