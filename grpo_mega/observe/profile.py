"""torch's profiler over some steps of the last stage (`run.profile_steps`).

It leaves a file a rank in profile/, which Perfetto and TensorBoard open.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile

from grpo_mega.config.derived import read_steps
from grpo_mega.config.schema import RunConfig
from grpo_mega.observe.logs import OnlyShows

FOLDER = "profile"
"""Folder in the run directory."""

logger = logging.getLogger(__name__)


class Profile:
    """Profiles this rank while the stage's steps are in the range, and writes the profile, also after a stop.

    A run that continues inside the range profiles the remaining steps, into a separate file.
    """

    def __init__(self, config: RunConfig, is_last: bool, rank: int) -> None:
        """Profiles the last stage if `run.profile_steps` is set; nothing otherwise."""
        self._steps = read_steps(config.profile_steps) if config.profile_steps and is_last else range(0)
        self._folder, self._rank = Path(config.root) / config.name / FOLDER, rank
        self._only_shows = OnlyShows()
        self._profiler: profile | None = None
        self._first = 0

    def before(self, step: int) -> None:
        """Begins to profile when the step is in the range."""
        if self._profiler is None and step in self._steps:
            with self._only_shows(FOLDER):
                kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
                profiler = profile(activities=kinds)
                profiler.start()
                self._first, self._profiler = step, profiler

    def after(self, step: int) -> None:
        """Writes the file after the range's last step."""
        if self._profiler and step == self._steps[-1]:
            self._write(f"{self._first}-{step}")

    def _write(self, steps: str) -> None:
        """Ends profiling and writes the file."""
        assert self._profiler
        profiler, self._profiler = self._profiler, None
        file = self._folder / f"rank-{self._rank:05d}-steps-{steps}.pt.trace.json.gz"
        # torch writes the file piece by piece; under its own name there is only a whole one.
        temporary = self._folder / f".{file.name}"
        with self._only_shows(FOLDER):
            profiler.stop()
            self._folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(temporary))
            temporary.replace(file)
            logger.info("the profile of steps %s is %s", steps, file)

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Writes what was profiled of a range that a stop cuts short."""
        if self._profiler:
            self._write(f"{self._first}-stopped")
