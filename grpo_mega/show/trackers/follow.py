"""Sends the metrics of a run to a tracker: a program that reads metrics.jsonl, during the run or afterwards.

    python -m grpo_mega.show.trackers.follow runs/tiny wandb

A run starts one for each of `run.trackers`, on rank 0's machine alone (`trackers.py`). A tracker that hangs, raises or
ends its process does so in this process. metrics.jsonl is the queue: lines that were not sent, because the network was
down or the run was killed, are sent by the next start of the run, or by this command, into the same run of the tracker.
Its id, and the last line that has certainly arrived, are in trackers/TRACKER.json. W&B and trackio queue lines: if they
were killed, all lines since they were opened are sent again. Otherwise steps that run again are not sent twice.

Trackers read their own variables: WANDB_API_KEY, WANDB_MODE, WANDB_ENTITY; TRACKIO_DIR, TRACKIO_SPACE_ID;
MLFLOW_TRACKING_URI.

Exit code: 0 all was sent, 1 the tracker failed, 2 the run has no metrics or the tracker is not installed.
"""

from __future__ import annotations

import argparse
import json
import re
import select
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from grpo_mega.config.schema.run import TRACKERS
from grpo_mega.observe.foreign import read_object, tell
from grpo_mega.observe.metric_table import find
from grpo_mega.observe.metrics import METRICS, is_held_out
from grpo_mega.platform.files import write_atomic
from grpo_mega.platform.orphans import come_after

DONE, FAILED, BAD_INPUT = 0, 1, 2
FOLDER = "trackers"
"""Folder in the run directory."""
SECONDS_BETWEEN_LOOKS = 1.0
Place = tuple[int, bool]
"""A line's step, and whether it has held-out results; lines come in this order."""


class Tracker(Protocol):
    """A run of a tracker.

    Attributes:
        id: The tracker's id of this run, with which it is resumed.
        queues: Whether `log` returns before a line has arrived; `close` then waits until it has.
    """

    id: str
    queues: bool

    def log(self, step: int, values: dict[str, float]) -> None:
        """Sends the metrics of a step."""
        ...

    def define(self, meanings: dict[str, str]) -> None:
        """Sends {metric: its meaning}, for metrics whose meaning was not sent before."""
        ...

    def close(self) -> None:
        """Completes what was sent."""
        ...


class WandB:
    """A run of W&B, or of trackio, which has the same interface."""

    queues = True

    def __init__(self, module: str, run: Path, project: str, known: str | None, config: dict[str, Any]) -> None:
        self._module = import_module(module)
        if module == "wandb":
            opened = self._module.init(
                project=project, name=run.name, id=known, resume="allow", dir=str(run), config=config,
                settings=self._module.Settings(console="off", disable_git=True),
            )  # fmt: skip
            self.id = str(opened.id)
        else:
            self.id = known or run.name
            opened = self._module.init(project=project, name=self.id, resume="allow", config=config)
        self._run = opened

    def log(self, step: int, values: dict[str, float]) -> None:
        """Sends the metrics of a step."""
        self._module.log(values, step=step)

    def define(self, meanings: dict[str, str]) -> None:
        """Writes the meanings into the run's configuration, under "metrics"."""
        if self._module.__name__ == "wandb":
            self._run.config.update({"metrics": meanings}, allow_val_change=True)

    def close(self) -> None:
        """Completes what was sent."""
        self._module.finish()


class MLflow:
    """A run of MLflow, whose experiment is the project; meanings of metrics are in the run's metrics.json."""

    queues = False

    def __init__(self, run: Path, project: str, known: str | None, config: dict[str, Any]) -> None:
        self._mlflow = import_module("mlflow")
        self._mlflow.set_experiment(project)
        opened = self._mlflow.start_run(run_id=known, run_name=None if known else run.name, log_system_metrics=False)
        self.id = str(opened.info.run_id)
        if known is None:
            self._mlflow.log_dict(config, "config.yaml")

    def log(self, step: int, values: dict[str, float]) -> None:
        """Sends the metrics of a step; characters that MLflow refuses in names become "_"."""
        self._mlflow.log_metrics({re.sub(r"[^\w/. :-]", "_", name): value for name, value in values.items()}, step=step)

    def define(self, meanings: dict[str, str]) -> None:
        """Writes the meanings into an artifact of the run."""
        self._mlflow.log_dict(meanings, "metrics.json")

    def close(self) -> None:
        """Completes what was sent."""
        self._mlflow.end_run()


def open_tracker(kind: str, run: Path, project: str, known: str | None) -> Tracker:
    """Opens a run of a tracker: the one with the id `known`, or a new one if that is None.

    Raises:
        ImportError: The tracker is not installed.
    """
    file = run / "config.yaml"
    config = read_object(file) if file.is_file() else {}
    return MLflow(run, project, known, config) if kind == "mlflow" else WandB(kind, run, project, known, config)


def lines_after(file: Path, last: Place | None) -> Iterator[tuple[Place, dict[str, float]]]:
    """Yields place and numeric metrics of each whole line of a metrics.jsonl that comes after `last`."""
    for line in file.read_text().splitlines(keepends=True) if file.is_file() else ():
        # The run is still writing this line; the next look finds it whole.
        if not line.endswith("\n"):
            return
        record = json.loads(line)
        place = record.pop("step"), is_held_out(record)
        if last is None or place > last:
            yield place, {name: value for name, value in record.items() if value is not None}


def meaning(name: str) -> str:
    """Definition and unit of a metric, from the table of metrics."""
    metric = find(name)
    if metric is None:
        return ""
    return f"{metric.meaning} [{metric.unit}]" if metric.unit else metric.meaning


class Following:
    """Sends the metrics of a run to a tracker, and keeps track of what was sent."""

    def __init__(self, kind: str, run: Path, project: str) -> None:
        """Opens the tracker's run: the one recorded in the run directory, or a new one."""
        self._metrics, self._state = run / METRICS, run / FOLDER / f"{kind}.json"
        known = json.loads(self._state.read_text()) if self._state.is_file() else {}
        # Another project has none of the metrics yet, and gets all of them.
        if known and known["project"] != project:
            known = {}
        self._project, self._defined = project, set[str]()
        self._last: Place | None = (known["sent"][0], known["sent"][1]) if known.get("sent") else None
        self._seen: tuple[int, int] | None = None
        self.tracker = open_tracker(kind, run, project, known.get("id"))
        # Recorded before the first line is sent: after a kill, the next start must continue this run of the tracker and
        # not open a second one.
        self._remember(self._last)

    def send(self) -> None:
        """Sends the new lines; reads nothing if the file is unchanged."""
        status = self._metrics.stat() if self._metrics.is_file() else None
        if status is None or (status.st_size, status.st_mtime_ns) == self._seen:
            return
        self._seen = status.st_size, status.st_mtime_ns
        before = self._last
        for place, values in lines_after(self._metrics, before):
            if not values.keys() <= self._defined:
                self._defined |= values.keys()
                self.tracker.define({name: meaning(name) for name in sorted(self._defined)})
            self.tracker.log(place[0], values)
            self._last = place
        # A tracker that queues may not have delivered yet; its lines count as sent once `close` has waited for them.
        if self._last != before and not self.tracker.queues:
            self._remember(self._last)

    def close(self) -> None:
        """Waits until everything sent has arrived, and records it."""
        self.tracker.close()
        self._remember(self._last)

    def _remember(self, sent: Place | None) -> None:
        self._state.parent.mkdir(exist_ok=True)
        known = {"id": self.tracker.id, "project": self._project, "sent": sent}
        write_atomic(self._state, json.dumps(known) + "\n")


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("tracker", choices=TRACKERS, help="where the metrics go")
    parser.add_argument("--project", default="grpo_mega", help="the tracker's project, or experiment (%(default)s)")
    parser.add_argument("--parent", type=int, help="used by runs: continue until standard input says end")
    options = parser.parse_args(arguments)
    if options.parent:
        come_after(options.parent)
    elif not (options.run / METRICS).is_file():
        print(f"error: {options.run / METRICS}: not found; choose a run directory, such as runs/tiny", file=sys.stderr)
        return BAD_INPUT
    try:
        following = Following(options.tracker, options.run.resolve(), options.project)
        going = True
        while going:
            # Whether the run goes on is asked before its lines are sent, so that the last ones are not missed.
            going = bool(options.parent)
            if going:
                # Waits a while. Readable means "end", or that the run has closed the pipe.
                ready, _, _ = select.select([sys.stdin], [], [], SECONDS_BETWEEN_LOOKS)
                going = not ready
            following.send()
        following.close()
    except ImportError as error:
        print(f"{error}: pip install {'mlflow' if options.tracker == 'mlflow' else options.tracker}", file=sys.stderr)
        return BAD_INPUT
    # Trackers may raise anything.
    except Exception as error:
        tell(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}", sys.stderr)
        return FAILED
    return DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
