"""Who shows a run: the observers that its settings ask for."""

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
from grpo_mega.show.report.background import BackgroundReport
from grpo_mega.show.trackers.prometheus import Prometheus
from grpo_mega.show.trackers.trackers import Trackers


def observers_of(run: RunConfig, path: Path, columns: Sequence[Column] = TABLE) -> Observers:
    """The observers of a run in `path`; the console, which prints `columns`, comes first, and so finishes last."""
    found: dict[str, Callable[[], Observer]] = {
        "the console": partial(Console, run.steps, path, run.print_every, columns),
        REPORT: partial(BackgroundReport, path, run.report_every),
    }
    if run.prometheus is not None:
        found[f"run.prometheus={run.prometheus}"] = partial(Prometheus, Path(run.prometheus), run.name)
    if run.trackers:
        found["run.trackers"] = partial(Trackers, path, run.trackers, run.tracker_project)
    return found | {"curves.png": partial(Curves, path)}
