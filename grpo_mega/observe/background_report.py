"""Writes report.html while a run goes on, in a process of its own: no step waits for it."""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path

from grpo_mega.platform.beside import start_beside

LOG = Path("logs") / "report.log"
"""In the run directory: why a page was not written."""

logger = logging.getLogger(__name__)


class BackgroundReport:
    """The page about the run in a directory, as it was when a step began it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Starts to write it; not while one is being written, which a slow disk may take longer for."""
        if self._writer and self._writer.poll() is None:
            return
        try:
            self._writer = start_beside("grpo_mega.report", [self._path], self._path / LOG)
        except OSError as error:
            logger.warning("no page about the run is written now: %s", error)

    def end(self) -> None:
        """Ends what is being written: from now on it would be older than what the run's end writes."""
        if self._writer:
            self._writer.kill()
            self._writer.wait()
            self._writer = None
