"""Writes report.html while a run goes on, in a process of its own: no step waits for it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from grpo_mega.platform.beside import start_beside

LOG = Path("logs") / "report.log"
"""Log file in the run directory, which says why a page was not written."""


class BackgroundReport:
    """Writes the page about a run in the background."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Starts to write the page, unless one is still being written, as on a slow disk."""
        if self._writer and self._writer.poll() is None:
            return
        self._writer = start_beside("grpo_mega.report", [self._path], self._path / LOG)

    def end(self) -> None:
        """Stops writing: from now on this page would be older than the one that the run's end writes."""
        if self._writer:
            self._writer.kill()
            self._writer.wait()
            self._writer = None
