"""Everything a run records, in one object; on ranks other than the main one it does nothing.

Metrics, samples, alarms and the summary are written here. Whatever shows them (console, report, trackers) subscribes as
an `Observer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_mega.config.schema import ANY, AlarmsConfig, RunConfig
from grpo_mega.observe.alarm_log import AlarmLog
from grpo_mega.observe.experts import EXPERTS, ExpertLog, Loads
from grpo_mega.observe.logs import OnlyShows
from grpo_mega.observe.metrics import HELD_OUT, METRICS, MetricsLog
from grpo_mega.observe.samples import write_samples
from grpo_mega.observe.summary import write_summary
from grpo_mega.platform.files import write_atomic


class Observer:
    """Shows a run; a subclass overrides what it needs.

    An error in it is logged once with its traceback, and the run goes on: no method may contain a collective.

    Attributes:
        say: Prints a line; the recorder sets it.
        at_the_end: What `finish` does, shown as a phase; empty if it takes no time.
    """

    say: Callable[[str], None]
    at_the_end = ""

    def start(self, lines: list[str], where: str) -> None:
        """The run begins: what it is, and on which machines."""

    def note(self, text: str) -> None:
        """Any other line."""

    def stage(self, name: str, step: int, steps: int) -> None:
        """A stage begins, or goes on after `step` of at most `steps` steps; the last stage has no name."""

    def phase(self, name: str) -> None:
        """A phase of a step begins or, often, goes on."""

    def samples(self, done: int, needed: int) -> None:
        """The phase has `done` of the samples that it needs."""

    def step(self, step: int, metrics: dict[str, float], shown: Sequence[dict[str, Any]]) -> None:
        """A step is over; `shown` are records of some of its samples."""

    def alarm(self, record: dict[str, Any]) -> None:
        """An alarm rises or is over; `record` is a line of alarms.jsonl."""

    def evaluation(self, step: int, split: str, metrics: dict[str, float]) -> None:
        """An evaluation after `step` is over."""

    def finish(self, summary: dict[str, Any]) -> dict[str, Any] | None:
        """The run has completed, or an alarm has stopped it. Returns what it adds to the summary."""

    def close(self) -> None:
        """Releases everything, however the run ended."""


Observers = Mapping[str, Callable[[], Observer]]
"""Description used in the warning when an observer fails, mapped to its factory. `finish` is called from the last to
the first."""


class Recorder:
    """Writes metrics, samples and the summary into the run directory, and tells the observers.

    An error in metrics or summary, on which others rely, ends the run; one in anything that only shows the run is
    logged (`OnlyShows`).
    """

    def __init__(
        self,
        run: RunConfig,
        path: Path,
        main: bool,
        observers: Callable[[], Observers] = dict,
        limits: AlarmsConfig | None = None,
    ) -> None:
        """Prepares to record a run of `run.steps` steps in `path` if this is the main rank; `observers` show it.

        Alarms rise by the thresholds `limits`, or their defaults.
        """
        self.run = run
        self.path = path
        self._main, self._only_shows = main, OnlyShows()
        self.metrics: MetricsLog | None = None
        self.alarms: AlarmLog | None = None
        self.experts: ExpertLog | None = None
        self._limits = limits or AlarmsConfig()
        self._observers: dict[str, Observer] = {}
        wanted: Observers = {}
        with self._only_shows("what shows the run"):
            wanted = observers() if main else {}
        for name, make in wanted.items():
            with self._only_shows(name):
                observer = self._observers[name] = make()
                observer.say = self.note

    def _tell(self, what: Callable[[Observer], object]) -> None:
        for name, observer in self._observers.items():
            with self._only_shows(name):
                what(observer)

    def start(self, lines: list[str], where: str) -> None:
        """Shows what is about to run, and on which machines."""
        self._tell(lambda observer: observer.start(lines, f"{where}, in {self.path}"))

    def note(self, text: str) -> None:
        """Shows any other line."""
        self._tell(lambda observer: observer.note(text))

    def phase(self, name: str) -> None:
        """Shows which phase runs."""
        self._tell(lambda observer: observer.phase(name))

    def samples(self, done: int, needed: int) -> None:
        """Shows how many samples of the phase are done, and how many it needs."""
        self._tell(lambda observer: observer.samples(done, needed))

    def take_lines(self, run: Path) -> None:
        """Takes over the lines of another run directory, whose later steps `open_metrics` removes."""
        for file in run.glob("*.jsonl") if self._main else ():
            write_atomic(self.path / file.name, file.read_bytes())

    def open_metrics(self, resume_from_step: int, name: str = METRICS, steps: int | None = None) -> None:
        """Continues the file `name` after this step, or begins it (-1).

        The last stage, whose file is metrics.jsonl, has alarms. The stage takes at most `steps` steps; None for
        `run.steps`.
        """
        if not self._main:
            return
        last, most = name == METRICS, self.run.steps if steps is None else steps
        if self.metrics:
            self.metrics.close()
        self.metrics = MetricsLog(self.path, self.run.tensorboard, resume_from_step, name)
        # After MetricsLog, which removes lines of steps that run again: alarms follow from the lines that remain.
        self.alarms = AlarmLog(self.path, self._limits, resume_from_step) if last else None
        self.experts = None
        with self._only_shows(EXPERTS):
            self.experts = ExpertLog(self.path, resume_from_step) if last else None
        stage = "" if last else name.removesuffix(".jsonl")
        self._tell(lambda observer: observer.stage(stage, max(resume_from_step, 0), most))
        for record in self.alarms.changed if self.alarms else ():
            self._tell(lambda observer, record=record: observer.alarm(record))  # type: ignore[misc]

    def step(
        self, step: int, metrics: dict[str, float], shown: Sequence[dict[str, Any]], loads: Loads | None = None
    ) -> None:
        """Records a finished step: metrics, samples (`shown`, to samples/) and loads of experts (to experts.jsonl)."""
        if self.metrics is None:
            return
        # Metrics first: checkpoints rely on the line, and all that follows may fail without harm.
        self.metrics.write(step, metrics)
        with self._only_shows(EXPERTS):
            if self.experts:
                self.experts.write(step, loads or {})
        with self._only_shows("samples/"):
            if shown:
                write_samples(self.path, step, shown)
        self._tell(lambda observer: observer.step(step, metrics, shown))
        with self._only_shows("the alarms"):
            for record in self.alarms.step(step, metrics, shown) if self.alarms else ():
                self._tell(lambda observer, record=record: observer.alarm(record))  # type: ignore[misc]

    def alarm_that_stops(self) -> dict[str, Any] | None:
        """On the main rank, the record of an alarm that is up and that `run.stop_on` names."""
        up = self.alarms.up if self.alarms else {}
        names = up if ANY in self.run.stop_on else self.run.stop_on
        return next((up[name] for name in names if name in up), None)

    def evaluation(
        self, step: int, split: str, metrics: dict[str, float], followed: Sequence[dict[str, Any]] = ()
    ) -> None:
        """Records results on validation or held-out problems; held-out ones get a separate line of metrics.

        Completions of the problems that are followed over training, if any, go to samples/.
        """
        with self._only_shows("samples/"):
            if followed and self._main:
                write_samples(self.path, step, followed, "followed")
        if split == "held-out" and self.metrics:
            self.metrics.write(step, {f"{HELD_OUT}{name}": value for name, value in metrics.items()})
        self._tell(lambda observer: observer.evaluation(step, split, metrics))

    def finish(self, summary: dict[str, Any]) -> None:
        """Writes summary.json, and lets the observers end."""
        if self.metrics is None:
            return
        summary = summary | {"alarms": []}
        with self._only_shows("the alarms"):
            summary["alarms"] = self.alarms.summary() if self.alarms else []
        self.metrics.close()
        # Written before observers finish, some of which take a while or fail, and again if one adds to it.
        write_summary(self.path, summary)
        for name, observer in reversed(self._observers.items()):
            with self._only_shows(name):
                if observer.at_the_end:
                    self.phase(observer.at_the_end)
                if more := observer.finish(summary):
                    write_summary(self.path, summary | more)
                    summary |= more

    def close(self) -> None:
        """Completes the files, and lets the observers release what they have, however the run ended."""
        if self.metrics:
            self.metrics.close()
        self._tell(lambda observer: observer.close())
