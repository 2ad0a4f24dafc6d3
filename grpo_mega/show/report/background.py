"""Writes report.html while a run goes on, in a process of its own: no step waits for it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_mega.observe.recorder import Observer
from grpo_mega.observe.run_dir import REPORT
from grpo_mega.platform.orphans import start_beside

LOG = Path("logs") / "report.log"
"""Log file in the run directory, which says why a page was not written."""


class BackgroundReport(Observer):
    """Writes the page about a run in the background, every so many steps."""

    def __init__(self, path: Path, every: int) -> None:
        """Will write the page of the run in `path` after `every` steps; 0 for never."""
        self._path, self._every = path, every
        self._writer: subprocess.Popen[bytes] | None = None

    def stage(self, name: str, step: int, steps: int) -> None:
        """Removes an earlier page, which would be older than the metrics."""
        (self._path / REPORT).unlink(missing_ok=True)

    def step(self, step: int, metrics: dict[str, float], shown: Sequence[dict[str, Any]]) -> None:
        """Starts to write the page when due, unless one is still being written, as on a slow disk."""
        if not self._every or step % self._every or (self._writer and self._writer.poll() is None):
            return
        self._writer = start_beside("grpo_mega.show.report", [self._path], self._path / LOG)

    def finish(self, summary: dict[str, Any]) -> None:
        """Stops writing: from now on this page would be older than the one that the run's end writes."""
        self.close()

    def close(self) -> None:
        """Stops writing."""
        if self._writer:
            self._writer.kill()
            self._writer.wait()
            self._writer = None
