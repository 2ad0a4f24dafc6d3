"""The observers of a run, by its settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from grpo_mega.config.schema import RunConfig
from grpo_mega.observe.recorder import Observer, Observers
from grpo_mega.observe.run_dir import REPORT
from grpo_mega.show.console.columns import TABLE, Column
from grpo_mega.show.console.console import Console
from grpo_mega.show.plot import Curves
from grpo_mega.show.report.page import BackgroundReport
from grpo_mega.show.trackers.trackers import Prometheus, Trackers


def observers_of(run: RunConfig, path: Path, columns: Sequence[Column] = TABLE) -> Observers:
    """The observers of a run in `path`; the console, which prints `columns`, comes first, and so finishes last."""
    observers: dict[str, Callable[[], Observer]] = {
        "the console": partial(Console, run.steps, path, run.print_every, columns),
        REPORT: partial(BackgroundReport, path, run.report_every),
    }
    if run.prometheus is not None:
        observers[f"run.prometheus={run.prometheus}"] = partial(Prometheus, Path(run.prometheus), run.name)
    if run.trackers:
        observers["run.trackers"] = partial(Trackers, path, run.trackers, run.tracker_project)
    return observers | {"curves.png": partial(Curves, path)}
