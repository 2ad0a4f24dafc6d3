"""Sends metrics elsewhere: to trackers, each in its own process (`follow.py`), and into a file for Prometheus."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_mega.observe.metric_table import find
from grpo_mega.observe.recorder import Observer
from grpo_mega.platform.files import write_atomic
from grpo_mega.platform.orphans import start_beside

SECONDS_AT_THE_END = 60.0
"""Seconds within which a complete run's metrics must be sent; the rest is sent later."""
SECONDS_AFTER_A_STOP = 5.0
"""Seconds within which metrics must be sent if the run was stopped or failed: torchrun waits 30 s for a rank."""

logger = logging.getLogger(__name__)


class Trackers(Observer):
    """The processes that send this run's metrics from its last stage on; no step waits for them, even if they hang."""

    at_the_end = "trackers"

    def __init__(self, run: Path, kinds: Sequence[str], project: str) -> None:
        """Prepares to start the trackers `kinds`; their output goes to logs/tracker-NAME.log."""
        self._run, self._project = run, project
        self._waiting = [*dict.fromkeys(kinds)]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def stage(self, name: str, step: int, steps: int) -> None:
        """Starts the trackers when the last stage begins. The main thread must call it."""
        while not name and self._waiting:
            kind = self._waiting.pop(0)
            words = [str(self._run), kind, "--project", self._project]
            try:
                self._processes[kind] = start_beside("grpo_mega.show.trackers.follow", words, self._log(kind))
            except OSError as error:
                logger.warning("the tracker %s cannot be started: %s; the run goes on", kind, error)

    def _log(self, kind: str) -> Path:
        return self._run / "logs" / f"tracker-{kind}.log"

    def step(self, step: int, metrics: dict[str, float], shown: Sequence[dict[str, Any]]) -> None:
        """Warns once of each tracker that has ended; never waits."""
        for kind, process in [*self._processes.items()]:
            if process.poll() is not None:
                del self._processes[kind]
                self._kill(process)
                self._warn(kind, f"ended with exit code {process.returncode}")

    def finish(self, summary: dict[str, Any]) -> None:
        """Lets the trackers send the rest, for a minute if the run is complete, and ends them."""
        self.end(SECONDS_AT_THE_END if summary["status"] == "completed" else SECONDS_AFTER_A_STOP)

    def close(self) -> None:
        """Lets the trackers send the rest, for a moment, and ends them."""
        self.end(SECONDS_AFTER_A_STOP)

    def end(self, seconds: float) -> None:
        """Lets the trackers send the rest, for at most `seconds`, and ends them."""
        # All trackers are told before any is waited for, so that they finish side by side within one deadline.
        for process in self._processes.values():
            assert process.stdin
            # The pipe breaks when the tracker has ended.
            with suppress(BrokenPipeError):
                process.stdin.write(b"end\n")
                process.stdin.close()
        deadline = time.monotonic() + seconds
        for kind, process in self._processes.items():
            try:
                code = process.wait(max(0.0, deadline - time.monotonic()))
                why = f"ended with exit code {code}" if code else ""
            except subprocess.TimeoutExpired:
                why = f"has not sent all metrics within {seconds:g} s"
            self._kill(process)
            if why:
                self._warn(kind, why)
        self._processes = {}

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """Ends a tracker and the processes that it has started: it leads their process group."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _warn(self, kind: str, why: str) -> None:
        output = self._log(kind).read_text(errors="replace").strip().splitlines()
        logger.warning(
            "the tracker %s %s%s; the run goes on. python -m grpo_mega.show.trackers.follow %s %s --project %s sends "
            "the rest, and so does the next start of the run; %s has its output",
            kind, why, f" ({output[-1]})" if output else "", self._run, kind, self._project, self._log(kind),
        )  # fmt: skip


class Prometheus(Observer):
    """Writes a file for the textfile collector of Prometheus' node exporter after each step of the last stage.

    The text format 0.0.4 has three lines a metric: a library would save nothing but the atomic rename.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self._folder, self._run, self._last = folder, run, False

    def stage(self, name: str, step: int, steps: int) -> None:
        """Notes whether this is the last stage."""
        self._last = not name

    def step(self, step: int, metrics: dict[str, float], shown: Sequence[dict[str, Any]]) -> None:
        """Replaces the file."""
        if self._last:
            write_prometheus(self._folder, self._run, step, metrics)


def write_prometheus(folder: Path, run: str, step: int, metrics: Mapping[str, float | None]) -> None:
    """Writes grpo_mega_RUN.prom, atomically, into an existing folder.

    Raises:
        OSError: The file cannot be written.
    """
    write_atomic(folder / f"grpo_mega_{run}.prom", prometheus_text(run, {"step": step, **metrics}))


def prometheus_text(run: str, metrics: Mapping[str, float | None]) -> str:
    """A gauge for each metric, with its name as a label, as several metrics may share a Prometheus name."""
    families: dict[str, list[str]] = {}
    for name, value in metrics.items():
        if value is None:
            continue
        family = "grpo_mega_" + re.sub(r"[^A-Za-z0-9_]", "_", name)
        known = find(name)
        help_ = f"{known.meaning} [{known.unit or 'a pure number'}]" if known else name
        help_ = help_.replace("\\", "\\\\").replace("\n", "\\n")
        head = [f"# HELP {family} {help_}", f"# TYPE {family} gauge"]
        line = f'{family}{{run="{_quoted(run)}",metric="{_quoted(name)}"}} {float(value)!r}'
        families.setdefault(family, head).append(line)
    return "".join(line + "\n" for lines in families.values() for line in lines)


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
