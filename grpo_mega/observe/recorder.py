"""Everything a run writes and prints, in one object; on ranks other than the main one it does nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_mega.config.schema import ANY, AlarmsConfig, RunConfig
from grpo_mega.observe.alarm_log import AlarmLog
from grpo_mega.observe.background_report import BackgroundReport
from grpo_mega.observe.columns import TABLE, Column
from grpo_mega.observe.console import Console
from grpo_mega.observe.experts import EXPERTS, ExpertLog, Loads
from grpo_mega.observe.metrics import HELD_OUT, METRICS, MetricsLog, read_metrics
from grpo_mega.observe.only_shows import OnlyShows
from grpo_mega.observe.prediction import Prediction
from grpo_mega.observe.prometheus import write_prometheus
from grpo_mega.observe.run_dir import REPORT
from grpo_mega.observe.samples import telling, write_samples
from grpo_mega.observe.summary import write_summary
from grpo_mega.observe.trackers import SECONDS_AFTER_A_STOP, SECONDS_AT_THE_END, Trackers
from grpo_mega.platform.files import write_atomic


class Recorder:
    """Writes metrics, samples, curves and the summary into the run directory, and shows progress.

    An error in metrics or summary, on which others rely, ends the run; one in what only shows is logged (`OnlyShows`).
    """

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
        self._main, self._only_shows = main, OnlyShows()
        self.console: Console | None = None
        with self._only_shows("the console"):
            self.console = Console(run.steps, run.name, run.print_every, columns) if main else None
        self.metrics: MetricsLog | None = None
        self.alarms: AlarmLog | None = None
        self.experts: ExpertLog | None = None
        self.trackers: Trackers | None = None
        self.prediction: Prediction | None = None
        self._limits = limits or AlarmsConfig()
        self._report = BackgroundReport(path)

    def start(self, lines: list[str], where: str) -> None:
        """Prints what is about to run, and on which machines."""
        with self._only_shows("the console"):
            if self.console:
                self.console.start(lines, f"{where}, in {self.path}")

    def compare(self, prediction: Prediction) -> None:
        """Has the first steps of the last stage compared with their plan."""
        if self._main:
            self.prediction = prediction

    def note(self, text: str) -> None:
        """Prints any other line."""
        with self._only_shows("the console"):
            if self.console:
                self.console.note(text)

    def phase(self, name: str) -> None:
        """Shows which phase runs; see `Console.phase`."""
        with self._only_shows("the console"):
            if self.console:
                self.console.phase(name)

    def samples(self, done: int, needed: int) -> None:
        """Shows how many samples of the phase are done, and how many it needs."""
        with self._only_shows("the console"):
            if self.console:
                self.console.samples(done, needed)

    def take_lines(self, run: Path) -> None:
        """Takes over the lines of another run directory, whose later steps `open_metrics` removes."""
        for file in run.glob("*.jsonl") if self._main else ():
            write_atomic(self.path / file.name, file.read_bytes())

    def open_metrics(self, resume_from_step: int, name: str = METRICS, steps: int | None = None) -> None:
        """Continues the file `name` after this step, or begins it (-1); removes an earlier report.html.

        The last stage, whose file is metrics.jsonl, has alarms. The stage takes at most `steps` steps; None for
        `run.steps`.
        """
        if not self._main:
            return
        with self._only_shows("the console"):
            if self.console:
                stage = "" if name == METRICS else name.removesuffix(".jsonl")
                self.console.stage(stage, max(resume_from_step, 0), self.run.steps if steps is None else steps)
        if self.metrics:
            self.metrics.close()
        self.metrics = MetricsLog(self.path, self.run.tensorboard, resume_from_step, name)
        self.alarms = AlarmLog(self.path, self._limits, resume_from_step) if name == METRICS else None
        self.experts = None
        with self._only_shows(REPORT):
            (self.path / REPORT).unlink(missing_ok=True)
        with self._only_shows(EXPERTS):
            self.experts = ExpertLog(self.path, resume_from_step) if name == METRICS else None
        with self._only_shows("run.trackers"):
            if name == METRICS and self.run.trackers and self.trackers is None:
                self.trackers = Trackers(self.path, self.run.trackers, self.run.tracker_project)
        self._print_alarms(self.alarms.changed if self.alarms else ())

    def step(
        self, step: int, metrics: dict[str, float], shown: Sequence[dict[str, Any]], loads: Loads | None = None
    ) -> None:
        """Records a finished step: its metrics, samples (`shown`, to samples/) and loads of experts (to experts.jsonl).

        The console's table gets a row if it has columns for this stage.
        """
        if self.metrics is None:
            return
        self.metrics.write(step, metrics)
        with self._only_shows(EXPERTS):
            if self.experts:
                self.experts.write(step, loads or {})
        with self._only_shows("run.trackers"):
            if self.trackers:
                self.trackers.check()
        with self._only_shows(f"run.prometheus={self.run.prometheus}"):
            if self.run.prometheus is not None and self.alarms:  # only the last stage has alarms
                write_prometheus(Path(self.run.prometheus), self.run.name, step, metrics)
        with self._only_shows("samples/"):
            if shown:
                write_samples(self.path, step, shown)
        with self._only_shows("the console"):
            self._print_step(step, metrics, shown)
        with self._only_shows("the alarms"):
            self._print_alarms(self.alarms.step(step, metrics, shown) if self.alarms else ())
        with self._only_shows("the plan"):
            if self.prediction and self.alarms and (line := self.prediction.step(step, metrics)):
                self.note(line)
        with self._only_shows(REPORT):
            if self.run.report_every and step % self.run.report_every == 0:
                self._report.begin()

    def _print_step(self, step: int, metrics: dict[str, float], shown: Sequence[dict[str, Any]]) -> None:
        if self.console is None:
            return
        if not shown and not self.console.has_columns_for(metrics):
            self.console.count(step, metrics)
            return
        self.console.step(step, metrics)
        if self.console.shows_samples(step):
            for chosen, record in telling(shown):
                self.console.sample(record["prompt"], record["completion"], record["answer"], record["reward"], chosen)

    def _print_alarms(self, records: Sequence[dict[str, Any]]) -> None:
        with self._only_shows("the console"):
            for record in records:
                if self.console:
                    self.console.alarm(record)

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
        with self._only_shows("samples/"):
            if followed and self._main:
                write_samples(self.path, step, followed, "followed")
        with self._only_shows("the console"):
            if self.console:
                self.console.evaluation(step, split, {n: x for n, x in metrics.items() if "/" not in n})  # no tasks
        if split == "held-out" and self.metrics:
            held_out = {f"{HELD_OUT}{name}": value for name, value in metrics.items()}
            self.metrics.write(step, held_out)
            with self._only_shows("the console"):
                if self.console:
                    self.console.remember(held_out)

    def finish(self, summary: dict[str, Any]) -> None:
        """Writes summary.json and curves.png, and prints the results and where they are."""
        if self.metrics is None:
            return
        with self._only_shows(REPORT):
            self._report.end()
        summary = summary | {"alarms": []}
        with self._only_shows("the alarms"):
            summary["alarms"] = self.alarms.summary() if self.alarms else []
        self.metrics.close()
        write_summary(self.path, summary)
        if self.prediction:
            self.phase("planner")
            with self._only_shows("the plan"):
                if line := self.prediction.finish():
                    self.note(line)
                if planned := self.prediction.result():
                    write_summary(self.path, summary | planned)
        self.phase("curves")
        with self._only_shows("curves.png"):
            from grpo_mega.observe.plot import plot_curves  # matplotlib takes a second to import

            plot_curves(read_metrics(self.path / METRICS), self.path / "curves.png", self.run.name)
        if self.trackers and summary["status"] == "completed":
            self.phase("trackers")  # may take a while; the last lines are printed after it
            self._finish_trackers(SECONDS_AT_THE_END)
        with self._only_shows("the console"):
            if self.console:
                self.console.finish(summary, self.path)

    def close(self) -> None:
        """Cleans the terminal, completes the files and sends the rest to the trackers, however the run ended."""
        with self._only_shows(REPORT):
            self._report.end()
        with self._only_shows("the plan"):
            if self.prediction:
                self.prediction.close()
        with self._only_shows("the console"):
            if self.console:
                self.console.close()
        if self.metrics:
            self.metrics.close()
        self._finish_trackers(SECONDS_AFTER_A_STOP)

    def _finish_trackers(self, seconds: float) -> None:
        with self._only_shows("run.trackers"):
            if self.trackers:
                self.trackers.finish(seconds)
        self.trackers = None
