"""Persistent output of a run: checkpoints (written, also in the background, pruned and found again) and exports of the
policy."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from grpo_mega.checkpoint import checkpoint
from grpo_mega.config.recorded import run_of
from grpo_mega.config.schema import RunConfig
from grpo_mega.models.average import Copy
from grpo_mega.models.model import Model
from grpo_mega.observe.recorder import Recorder
from grpo_mega.observe.timer import PhaseTimer
from grpo_mega.platform import trace
from grpo_mega.platform.collectives import succeed_together
from grpo_mega.types import Step, StreamState

logger = logging.getLogger(__name__)

Saved = Model | Copy
"""Content of checkpoints: models, and copies of their weights."""


class Checkpoints:
    """The checkpoints of a run; every rank makes every call.

    Attributes:
        folder: Folder of the run's checkpoints.
        newest: The newest complete checkpoint, of this run or of the one that it forks; None when there is none.
    """

    def __init__(self, config: RunConfig, model: Model, timer: PhaseTimer) -> None:
        """Checkpoints of a run that trains `model`, timed as the phase "checkpoint"."""
        self.folder = Path(config.root) / config.name / "checkpoints"
        self.newest: Path | None = None
        self._config, self._model, self._timer = config, model, timer
        self._saving: checkpoint.Saving | None = None
        self._since = 0

    def save(
        self,
        path: Path,
        models: Sequence[Saved],
        state: dict[str, Any],
        in_progress: Step | None,
        stream: StreamState | None,
        wait: bool,
    ) -> None:
        """Writes a checkpoint; without `wait`, in the background while training continues, until `finish`."""
        # One checkpoint at a time: each replaces the queue through which the writers of the one before report.
        self.finish()
        with self._timer("checkpoint"):
            self._saving = checkpoint.Saving(path, models, state, not wait, in_progress, stream)
            self._since = trace.now()
        if wait:
            self.finish()

    def finish(self, wait: bool = True) -> None:
        """Completes a checkpoint that is being written, if any, and deletes the oldest ones.

        Without `wait`, does nothing until it is written.
        """
        if self._saving is None:
            return
        with self._timer("checkpoint"):
            if not self._saving.finish(wait):
                return
            self.newest, self._saving = self._saving.path, None
            # Shown from the start of the writing, which may span several steps.
            trace.under_way("checkpoint", self.newest.name, self._since)
            if self._model.topology.is_main:
                # Older checkpoints go only now that the newer one has its final name: a kill at any time leaves a whole
                # one.
                checkpoint.prune(self.newest, self._config.keep_checkpoints, self._config.keep_every)
                logger.info("the checkpoint %s is complete", self.newest)

    def find(self, recorder: Recorder) -> Path | None:
        """Finds the checkpoint to resume from: the newest undamaged one, or the one that `run.fork` names.

        With the latter, `recorder` takes over the records of its run.

        Raises:
            InputError: All checkpoints are damaged.
        """
        with self._timer("checkpoint"):
            self.newest = checkpoint.newest_whole(self.folder, self._model.role)
            # Only the first start forks: later ones find checkpoints in the run's own directory.
            if self.newest is None and self._config.fork:
                self.newest = checkpoint.whole(Path(self._config.fork), self._model.role)
                succeed_together(partial(recorder.take_lines, run_of(self.newest)))
        return self.newest


class Exporter(Protocol):
    """Exports the policy in a format for other programs; see `grpo_mega/convert/of_run.py`."""

    def path(self, step: int) -> Path:
        """Path of the export of a step."""
        ...

    def is_due(self, step: int) -> bool:
        """Whether `run.export_every` requires an export after `step` steps."""
        ...

    def is_there(self, step: int) -> bool:
        """Whether the export of a step was written."""
        ...

    def write(self, step: int, checkpoint: Path | None) -> None:
        """Exports the policy after `step` steps, leaving disk space for one more `checkpoint`."""
        ...


def export(exporter: Exporter, step: int, newest: Path | None, warns: bool) -> None:
    """Exports the policy after `step` steps; the rank that `warns` logs a failure, and training continues."""
    try:
        exporter.write(step, newest)
    except (ValueError, RuntimeError, OSError) as error:
        if warns:
            logger.warning(
                "the export %s was not written: %s; the next one follows as run.export_every says",
                exporter.path(step),
                error,
            )
