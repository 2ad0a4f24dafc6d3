"""Exports during a run: the policy after a given step, in a folder inside the run directory."""

from __future__ import annotations

import errno
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from grpo_mega.config.schema import Config
from grpo_mega.convert.card import Facts
from grpo_mega.convert.export import write_folder
from grpo_mega.data.tokenizer import Tokenizer
from grpo_mega.errors import InputError
from grpo_mega.models.body import DTYPES
from grpo_mega.models.policy import Policy
from grpo_mega.observe.summary import versions
from grpo_mega.platform.collectives import from_main_rank, succeed_together
from grpo_mega.weights.hf_config import family_of


@dataclass(frozen=True)
class Exports:
    """Exporter of a run's policy; every rank creates one, and makes every call.

    Attributes:
        run: The run directory.
        policy: The policy to export.
        config: The configuration of the run.
        tokenizer: Tokenizer of the run.
    """

    run: Path
    policy: Policy
    config: Config
    tokenizer: Tokenizer

    def __post_init__(self) -> None:
        """Raises InputError when no supported family matches the model, rather than after hours of training."""
        # Without exports a model of no family may be trained.
        if not self.config.run.export_every:
            return
        try:
            family_of(self.config.model)
        except InputError as error:
            where = f"run.export_every={self.config.run.export_every}"
            raise InputError(where, error.what, f"{error.fix}, or set 0") from None

    def path(self, step: int) -> Path:
        """Path of the export of a step."""
        return self.run / "export" / f"step-{step:06d}"

    def is_due(self, step: int) -> bool:
        """Whether `run.export_every` requires an export after `step` steps."""
        every = self.config.run.export_every
        return every > 0 and step > 0 and step % every == 0

    def is_there(self, step: int) -> bool:
        """Whether the export of a step was written; every rank must call it."""
        return from_main_rank(self.path(step).exists)

    def write(self, step: int, checkpoint: Path | None) -> None:
        """Exports the policy after `step` steps, replacing an export of an earlier start.

        Raises:
            RuntimeError: The disk failed, and nothing is left of the export; or it would have no space for one more
                `checkpoint`, and an export of an earlier start is left as it was.
        """
        parameters = self.policy.parameters()
        size = parameters * DTYPES[self.config.model.dtype].itemsize
        # The main rank removes and measures for all. A failure reaches every rank before any of them begins the
        # collective export.
        if self.policy.topology.is_main:
            succeed_together(lambda: _make_room(self.run, self.path(step), size, checkpoint))
        else:
            succeed_together(lambda: None)
        processes = self.policy.topology.world_size
        torchrun = f"torchrun --nproc-per-node {processes}" if processes > 1 else "python"
        facts = Facts(
            role="policy",
            stage=None,
            steps=step,
            architecture=family_of(self.config.model).architecture,
            parameters=parameters,
            dtype=self.config.model.dtype,
            versions=versions(),
            command=f"{torchrun} -m grpo_mega.train {shlex.join(sys.argv[1:])}",  # that started this process
            run=self.run,
        )
        write_folder(self.path(step), self.policy, self.config, self.tokenizer, facts)


def _make_room(run: Path, path: Path, size: int, checkpoint: Path | None) -> None:
    """Removes an existing export at `path` if the disk has space for the new one then.

    Raises:
        OSError: The disk cannot hold both an export of this size and another checkpoint like `checkpoint`; nothing was
            removed.
    """
    # An export is optional, a checkpoint is not: the disk must keep room for one more of the newest one's size.
    needed = size + (_bytes(checkpoint) if checkpoint else 0)
    if needed > (free := shutil.disk_usage(run).free + _bytes(path)):
        raise OSError(errno.ENOSPC, f"{free:,} bytes are free, it and the next checkpoint need {needed:,}", str(run))
    if path.exists():
        shutil.rmtree(path)


def _bytes(folder: Path) -> int:
    """Size of all files in a folder; 0 without one."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
