"""Writes report.html while a run goes on, in a process of its own: no step waits for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import grpo_mega

LOG = Path("logs") / "report.log"
"""In the run directory: why a page was not written."""


class BackgroundReport:
    """The page about the run in a directory, as it was when a step began it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Starts to write it; not while one is being written, which a slow disk may take longer for."""
        if self._writer and self._writer.poll() is None:
            return
        packages = [str(Path(grpo_mega.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {"PYTHONPATH": os.pathsep.join(packages), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        (self._path / LOG).parent.mkdir(exist_ok=True)
        with (self._path / LOG).open("ab") as log:
            self._writer = subprocess.Popen(
                [sys.executable, "-m", "grpo_mega.report", self._path], env=os.environ | own, stdout=log, stderr=log
            )

    def end(self) -> None:
        """Ends what is being written: from now on it would be older than what the run's end writes."""
        if self._writer:
            self._writer.kill()
            self._writer.wait()
            self._writer = None
