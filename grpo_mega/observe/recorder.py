"""Everything a run writes and prints, in one object; on ranks other than the main one it does nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo_mega.config.schema import ANY, AlarmsConfig, RunConfig
from grpo_mega.observe.alarm_log import AlarmLog
from grpo_mega.observe.background_report import BackgroundReport
from grpo_mega.observe.columns import TABLE, Column
from grpo_mega.observe.console import Console
from grpo_mega.observe.experts import EXPERTS, ExpertLog, Loads
from grpo_mega.observe.metrics import HELD_OUT, METRICS, MetricsLog, read_metrics
from grpo_mega.observe.prediction import Prediction
from grpo_mega.observe.prometheus import write_prometheus
from grpo_mega.observe.run_dir import REPORT
from grpo_mega.observe.samples import telling, write_samples
from grpo_mega.observe.summary import write_summary
from grpo_mega.observe.trackers import SECONDS_AFTER_A_STOP, SECONDS_AT_THE_END, Trackers

logger = logging.getLogger(__name__)


class Recorder:
    """Writes metrics, samples, curves and the summary into the run directory, and shows progress."""

    def __init__(
        self,
        run: RunConfig,
        path: Path,
        main: bool,
        columns: Sequence[Column] = TABLE,
        limits: AlarmsConfig | None = None,
    ) -> None:
        """Records the run of `run.steps` steps in directory `path` when this is the main rank, and prints `columns`.

        Alarms rise by the thresholds `limits`, or their defaults.
        """
        self.run = run
        self.path = path
        self.console = Console(run.steps, run.name, run.print_every, columns) if main else None
        self.metrics: MetricsLog | None = None
        self.alarms: AlarmLog | None = None
        self.experts: ExpertLog | None = None
        self.trackers: Trackers | None = None
        self.prediction: Prediction | None = None
        self._unexposed = False
        self._unwritten = set[str]()
        self._limits = limits or AlarmsConfig()
        self._report = BackgroundReport(path)

    def start(self, lines: list[str], where: str) -> None:
        """Prints what is about to run, and on which machines."""
        if self.console:
            self.console.start(lines, f"{where}, in {self.path}")

    def compare(self, prediction: Prediction) -> None:
        """Has the first steps of the last stage compared with their plan."""
        if self.console:
            self.prediction = prediction

    def note(self, text: str) -> None:
        """Prints any other line."""
        if self.console:
            self.console.note(text)

    def phase(self, name: str) -> None:
        """Shows which phase runs; see `Console.phase`."""
        if self.console:
            self.console.phase(name)

    def samples(self, done: int, needed: int) -> None:
        """Shows how many samples of the phase are done, and how many it needs."""
        if self.console:
            self.console.samples(done, needed)

    def open_metrics(self, resume_from_step: int, name: str = METRICS, steps: int | None = None) -> None:
        """Continues the file `name` after this step, or begins it (-1); removes an earlier report.html.

        The last stage, whose file is metrics.jsonl, has alarms. The stage takes at most `steps` steps; None for
        `run.steps`.
        """
        if self.console:
            stage = "" if name == METRICS else name.removesuffix(".jsonl")
            self.console.stage(stage, max(resume_from_step, 0), self.run.steps if steps is None else steps)
            if self.metrics:
                self.metrics.close()
            self._try(REPORT, lambda: (self.path / REPORT).unlink(missing_ok=True))
            self.metrics = MetricsLog(self.path, self.run.tensorboard, resume_from_step, name)
            self.alarms = AlarmLog(self.path, self._limits, resume_from_step) if name == METRICS else None
            self.experts = None
            if name == METRICS:
                self._try(EXPERTS, lambda: self._open_experts(resume_from_step))
            if name == METRICS and self.run.trackers and self.trackers is None:
                self.trackers = Trackers(self.path, self.run.trackers, self.run.tracker_project)
            for record in self.alarms.changed if self.alarms else ():
                self.console.alarm(record)

    def step(
        self, step: int, metrics: dict[str, float], shown: Sequence[dict[str, Any]], loads: Loads | None = None
    ) -> None:
        """Records a finished step: its metrics, samples (`shown`, to samples/) and loads of experts (to experts.jsonl).

        The console's table gets a row if it has columns for this stage.
        """
        if self.console is None or self.metrics is None:
            return
        self.metrics.write(step, metrics)
        if experts := self.experts:
            self._try(EXPERTS, lambda: experts.write(step, loads or {}))
        if self.trackers:
            self.trackers.check()
        self._expose(step, metrics)
        self._record(step, metrics, shown)
        for record in self.alarms.step(step, metrics) if self.alarms else ():
            self.console.alarm(record)
        if self.prediction and self.alarms and (line := self.prediction.step(step, metrics)):
            self.note(line)
        if self.run.report_every and step % self.run.report_every == 0:
            self._report.begin()

    def _expose(self, step: int, metrics: dict[str, float]) -> None:
        """Writes a step's file for Prometheus, if configured; warns once if that fails."""
        if self.run.prometheus is None or self._unexposed or self.alarms is None:  # only the last stage has alarms
            return
        try:
            write_prometheus(Path(self.run.prometheus), self.run.name, step, metrics)
        except OSError as error:
            self._unexposed = True
            logger.warning("run.prometheus=%s: %s; no further step is written there", self.run.prometheus, error)

    def _record(self, step: int, metrics: dict[str, float], shown: Sequence[dict[str, Any]]) -> None:
        """Shows a step on the console, and writes its samples."""
        assert self.console
        if not shown and not self.console.has_columns_for(metrics):
            self.console.count(step, metrics)
            return
        if shown:
            self._try("samples/", lambda: write_samples(self.path, step, shown))
        self.console.step(step, metrics)
        if self.console.shows_samples(step):
            for chosen, record in telling(shown):
                self.console.sample(record["prompt"], record["completion"], record["answer"], record["reward"], chosen)

    def alarm_that_stops(self) -> dict[str, Any] | None:
        """On the main rank, the record of an alarm that is up and that `run.stop_on` names."""
        up = self.alarms.up if self.alarms else {}
        names = up if ANY in self.run.stop_on else self.run.stop_on
        return next((up[name] for name in names if name in up), None)

    def evaluation(
        self, step: int, split: str, metrics: dict[str, float], followed: Sequence[dict[str, Any]] = ()
    ) -> None:
        """Records results on validation or held-out problems; held-out ones get a line of metrics of their own.

        Answers to the problems that are followed over training, if any, go to samples/.
        """
        if followed and self.console:
            self._try("samples/", lambda: write_samples(self.path, step, followed, "followed"))
        if self.console:
            self.console.evaluation(step, split, {n: x for n, x in metrics.items() if "/" not in n})  # without tasks
        if split == "held-out" and self.metrics:
            held_out = {f"{HELD_OUT}{name}": value for name, value in metrics.items()}
            self.metrics.write(step, held_out)
            if self.console:
                self.console.remember(held_out)

    def finish(self, summary: dict[str, Any]) -> None:
        """Writes summary.json and curves.png, and prints the results and where they are."""
        if self.console is None or self.metrics is None:
            return
        self._report.end()
        summary = summary | {"alarms": self.alarms.summary() if self.alarms else []}
        from grpo_mega.observe.plot import plot_curves  # matplotlib takes a second to import

        self.metrics.close()
        write_summary(self.path, summary)
        if self.prediction:
            self.console.phase("planner")
            if line := self.prediction.finish():
                self.note(line)
            if planned := self.prediction.result():
                write_summary(self.path, summary | planned)
        self.console.phase("curves")
        lines, curves = read_metrics(self.path / METRICS), self.path / "curves.png"
        self._try("curves.png", lambda: plot_curves(lines, curves, self.run.name))
        if self.trackers and summary["status"] == "completed":
            self.console.phase("trackers")  # may take a while; the last lines are printed after it
            self._finish_trackers(SECONDS_AT_THE_END)
        self.console.finish(summary, self.path)

    def close(self) -> None:
        """Cleans the terminal, completes the files and sends the rest to the trackers, however the run ended."""
        self._report.end()
        if self.prediction:
            self.prediction.close()
        if self.console:
            self.console.close()
        if self.metrics:
            self.metrics.close()
        self._finish_trackers(SECONDS_AFTER_A_STOP)

    def _open_experts(self, resume_from_step: int) -> None:
        self.experts = ExpertLog(self.path, resume_from_step)

    def _try(self, what: str, write: Callable[[], object]) -> None:
        """Writes something that the run does not need; if that fails, as on a full disk, warns once and goes on."""
        try:
            write()
        except OSError as error:
            if what not in self._unwritten:
                self._unwritten.add(what)
                logger.warning("%s: %s is not written: %s; the run goes on without it", self.path, what, error)

    def _finish_trackers(self, seconds: float) -> None:
        if self.trackers:
            self.trackers.finish(seconds)
            self.trackers = None
