"""Checkpoints. Each is one directory, which is either complete or absent.

    step-000020/  weights/  reference/  critic/  random/  state.json  manifest.json
    step-000020-updates-0003/  the same and step-in-progress*: the first three updates of step 21 are done
    step-000020/in-flight*     if samples outlive steps: those that later steps will take
    1-pretrain-step-000200/  of an earlier stage of the run, the first

`weights` holds the policy and its optimizer. Every other model of a stage has a folder with the name of its role: the
reference policy's holds weights, a critic's weights and optimizer. All of them can be read under any layout. `random`
holds every rank's random number generators, `state.json` the remaining state of the run, `manifest.json` the checksums
of all files. A checkpoint is written under a temporary name, sealed with its manifest, and then renamed.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from torch.distributed.checkpoint.api import CheckpointException

from grpo_mega.checkpoint import in_flight, random_state, safe_load, step_in_progress
from grpo_mega.checkpoint.integrity import damage, files_in_manifest, seal
from grpo_mega.checkpoint.model_state import (
    METADATA,
    folder_of,
    folders_of,
    load_into,
    refuse_adapters,
    state_to_save,
    weights_of,
)
from grpo_mega.checkpoint.writers import (
    ForkedQueue,
    finalized,
    in_one_process,
    start_results_queue,
    summing,
    waiting_on_hosts,
)
from grpo_mega.errors import InputError
from grpo_mega.models.average import AveragedPolicy, Copy
from grpo_mega.models.model import Model
from grpo_mega.models.reference import ReferencePolicy
from grpo_mega.platform.collectives import from_main_rank, succeed_together
from grpo_mega.platform.files import make_new, sync_folder, write_atomic
from grpo_mega.platform.manifest import MANIFEST
from grpo_mega.platform.orphans import forks_end_with_us
from grpo_mega.platform.stop import shielded_children
from grpo_mega.types import Step, StreamState

logger = logging.getLogger(__name__)

STATE = "state.json"
SECONDS_TO_MAKE_ROOM = 10
"""Seconds that other ranks wait for the main rank to remove what is left of a failed checkpoint."""
NAME = re.compile(r"(?:(\d+)-([a-z_]+)-)?step-(\d+)(?:-updates-(\d+))?")
"""Name of a checkpoint: number and name of the stage, unless it is the last; steps; updates of the next step."""
LAST = 1000
"""Sort key of a run's last stage, whose checkpoints have no number: larger than that of any other stage."""


def needed(role: str) -> tuple[str, ...]:
    """Files that the manifest of every checkpoint must name, in a run that trains a model of this role."""
    return (STATE, *(f"{folder_of(role)}/{name}" for name in safe_load.NEEDED))


NEEDED = needed("policy")
"""Files that the manifest of every checkpoint of a policy's run must name."""


class CannotSave(RuntimeError):
    """A checkpoint could not be written; nothing of it is left, and earlier ones are intact."""


def save(path: Path, models: Sequence[Model | Copy], state: dict[str, Any]) -> None:
    """Writes a checkpoint; every rank must call it. `state` is plain JSON, the same on every rank.

    Raises:
        InputError: Two models have the same role, or a role is not a valid folder name.
        CannotSave: The disk is full or failed, on any rank; raised on every rank that is still alive.
    """
    Saving(path, models, state, background=False).finish()


class Saving:
    """A checkpoint being written, in the `background` while training continues; every rank must create and finish it.

    It holds the state at its creation: the writing processes are forks, which see no later changes. The reference
    policy, which rarely changes, and all small files are written before the constructor returns. Both methods may raise
    `CannotSave`, as `save` does, and the constructor its InputError.
    """

    def __init__(
        self,
        path: Path,
        models: Sequence[Model | Copy],
        state: dict[str, Any],
        background: bool,
        in_progress: Step | None = None,
        stream: StreamState | None = None,
    ) -> None:
        self.path = path
        topology = models[0].topology
        self.is_main = topology.is_main
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._writers = AsyncCallsQueue()
        self._sums = ForkedQueue()
        folders = folders_of(models)
        # The forks that write must survive a SIGTERM to the process group, since the last checkpoint is written after
        # it, but they must not outlive this rank: the next attempt writes into a folder of the same name.
        with self._nothing_left_on_failure(), shielded_children(), forks_end_with_us():
            # Megatron picks its queue up when the first request is made, so it is replaced before.
            start_results_queue()
            succeed_together(lambda: _begin(self._temporary, folders, state) if self.is_main else None)
            succeed_together(lambda: random_state.save(self._temporary))
            if in_progress:
                succeed_together(lambda: step_in_progress.save(self._temporary, in_progress, topology))
            if stream:
                succeed_together(lambda: in_flight.save(self._temporary, stream, topology))
            # Writes of the main rank alone may fail on it alone. It then exits, and the others with it, as their
            # connection breaks. Writes of all ranks are checked by Megatron on all of them.
            later: list[tuple[Model | AveragedPolicy, str]] = []
            for model, folder in zip(models, folders, strict=True):
                # Always written at once: the reference's weights are swapped into the policy's model only inside this
                # block.
                if isinstance(model, ReferencePolicy):
                    with model.saved():
                        self._write_now(weights_of(model.policy), folder)
                elif background:
                    later.append((model, folder))
                else:
                    # Written one after the other, as Megatron holds copies of the data that it writes: the peak is one
                    # model's.
                    self._write_now(_state_of(model), folder)
            if later:
                # One process writes all models. Its tensors are copied to the host before the fork, so training may
                # change the originals as soon as the constructor returns.
                requests = [self._written(_state_of(model), folder) for model, folder in later]
                self._writers.schedule_async_request(in_one_process(requests))

    def finish(self, wait: bool = True) -> bool:
        """Seals and renames the checkpoint; False if files are still being written and `wait` is false."""
        with self._nothing_left_on_failure():
            # The order makes the checkpoint safe: first the data, then their checksums, then the final name. A kill in
            # between leaves only a temporary folder, which the next save of this step replaces.
            if not finalized(self._writers, wait, self._temporary):
                return False
            sums = {f"{folder}/{name}": s for folder, files in self._sums.all() for name, s in files.items()}
            seal(self._temporary, sums)
            self._sums.close()

            def rename() -> None:
                # A damaged checkpoint of the same step, from which the run fell back, may be in the way.
                if self.path.exists():
                    shutil.rmtree(self.path)
                self._temporary.rename(self.path)
                # Without this, a power loss could undo the rename after older checkpoints have been pruned.
                sync_folder(self.path.parent)

            succeed_together(rename if self.is_main else lambda: None)
            return True

    def _write_now(self, state: dict[str, Any], folder: str) -> None:
        waiting_on_hosts(self._written(state, folder)).execute_sync()

    def _written(self, state: dict[str, Any], folder: str) -> AsyncRequest:
        """Request to write this rank's share of a state into a folder of the checkpoint, and checksums into `_sums`."""
        path = self._temporary / folder
        request = dist_checkpointing.save(state, str(path), async_sharded_save=True, content_metadata=METADATA)
        return summing(request, path, self._sums)

    @contextmanager
    def _nothing_left_on_failure(self) -> Iterator[None]:
        try:
            yield
        except (Exception, CheckpointException) as error:
            # CheckpointException must be named: it derives from BaseException.
            # The cause is read before anything is removed: it reports how much space was free when the save failed.
            why = _cause(error, self.path)
            if self.is_main:
                shutil.rmtree(self._temporary, ignore_errors=True)
            # The others wait for that: logs may be on the same full disk, and could not record the error before.
            end = time.monotonic() + SECONDS_TO_MAKE_ROOM
            while not self.is_main and self._temporary.exists() and time.monotonic() < end:
                time.sleep(0.1)
            raise CannotSave(why) from error


def _state_of(model: Model | AveragedPolicy) -> dict[str, Any]:
    """State to save of a model that owns its tensors."""
    if isinstance(model, AveragedPolicy):
        with model.saved():
            return weights_of(model.policy)
    return state_to_save(model)


def _begin(temporary: Path, folders: list[str], state: dict[str, Any]) -> None:
    temporary.parent.mkdir(parents=True, exist_ok=True)
    make_new(temporary)
    for folder in (*folders, random_state.FOLDER):
        (temporary / folder).mkdir(parents=True)
    write_atomic(temporary / STATE, json.dumps(state, indent=2))


def _cause(error: BaseException, path: Path) -> str:
    """Cause of a failed save, the free space, and what to do."""
    # The text of a CheckpointException is one traceback per rank; the error messages in it are enough.
    if isinstance(error, CheckpointException):
        reason = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items()) or "see rank 0"
    else:
        reason = f"{type(error).__name__}: {error}"
    return (
        f"the checkpoint {path} cannot be written: {reason}. {shutil.disk_usage(path.parent).free:,} bytes are free in "
        f"{path.parent}. Nothing is left of it, and earlier checkpoints are intact: make room, or lower "
        "run.keep_checkpoints, and start the same command again"
    )


def load(path: Path, models: Sequence[Model | Copy]) -> dict[str, Any]:
    """Reads a checkpoint into models, and their optimizers where they have one; returns its state.

    Only files named in its manifest are read, and nothing in them is executed. Other models in the checkpoint are
    ignored.

    Raises:
        FileNotFoundError: There is no checkpoint at `path`.
        InputError: One of the models is missing, or a file contains something that would be executed.
    """
    if not (path / STATE).is_file():
        raise FileNotFoundError(f"{path}: not a checkpoint (no {STATE})")
    files = files_in_manifest(path)
    for model, folder in zip(models, folders_of(models), strict=True):
        load_into(model, path, folder, files)
    return json.loads((path / STATE).read_text())


def load_weights(path: Path, model: Model, role: str | None = None) -> dict[str, Any]:
    """Reads only the weights of the model with this `role` in the checkpoint; by default the role of `model`.

    Used to start a run: the model must not have an optimizer yet. Returns the checkpoint's state.

    Raises:
        FileNotFoundError: There is no checkpoint at `path`.
        InputError: The checkpoint is damaged, has no such model, or has adapters, which cannot be loaded as weights.
    """
    assert model.optimizer is None, "an optimizer made before would keep the old master weights"
    folder = folder_of(role or model.role)
    if not from_main_rank((path / STATE).is_file):
        raise FileNotFoundError(f"{path}: not a checkpoint (no {STATE})")
    if problem := damage(path, (STATE,)):
        raise InputError(str(path), f"the checkpoint is damaged: {problem}", "delete it, or choose another")
    refuse_adapters(path, folder)
    # A run with adapters may start from a checkpoint without any: its own adapters are not looked for.
    with model.chunks.without_adapters():
        load_into(model, path, folder, files_in_manifest(path))
    return json.loads((path / STATE).read_text())


def newest_whole(folder: Path, role: str = "policy") -> Path | None:
    """The latest intact checkpoint, or None when none was ever finished; every rank must call it.

    `role` is the role of the model that the run trains, which every checkpoint must contain.

    A damaged checkpoint is skipped, with a warning that names it and the one used instead.

    Raises:
        InputError: There are finished checkpoints, but all of them are damaged.
    """
    damaged: dict[Path, str] = {}
    # One rank lists the folder: on a shared file system the ranks may see different states, and would then compare
    # different checkpoints in the collectives of `damage`.
    for path in reversed(from_main_rank(lambda: _by_moment(folder))):
        more = (step_in_progress.FILE,) if _moment(path)[2] >= 0 else ()
        problem = damage(path, needed(role) + more)
        if problem is None:
            for other, why in damaged.items():
                logger.warning("the checkpoint %s is damaged (%s); using %s instead", other, why, path)
            return path
        damaged[path] = problem
    # Without a manifest a checkpoint was never finished, and starting over loses nothing. With one it was finished and
    # then damaged: starting over silently could throw away days of training.
    if from_main_rank(lambda: any((path / MANIFEST).exists() for path in damaged)):
        reasons = "; ".join(f"{path}: {why}" for path, why in damaged.items())
        raise InputError(
            str(folder), f"every checkpoint is damaged: {reasons}", "restore one, or delete the folder to start over"
        )
    return None


def whole(path: Path, role: str) -> Path:
    """The checkpoint of a run that trains a model of this role, if it is intact; every rank must call it.

    Raises:
        InputError: It is damaged, or not a checkpoint.
    """
    if not NAME.fullmatch(path.name):
        raise InputError(str(path), "not a checkpoint", "give one of a run, runs/NAME/checkpoints/step-000025")
    more = (step_in_progress.FILE,) if _moment(path)[2] >= 0 else ()
    if problem := damage(path, needed(role) + more):
        raise InputError(str(path), f"the checkpoint cannot be continued: {problem}", "choose another")
    return path


def step_path(
    folder: Path, step: int, in_progress: Step | None = None, earlier_stage: tuple[int, str] | None = None
) -> Path:
    """Path of the checkpoint of a step; with the step in progress, of one between it and the next.

    `earlier_stage` is the number (from 1) and name of a stage that is not the last.
    """
    stage = f"{earlier_stage[0]}-{earlier_stage[1]}-" if earlier_stage else ""
    updates = f"-updates-{len(in_progress.updates):04d}" if in_progress else ""
    return folder / f"{stage}step-{step:06d}{updates}"


def stage_of(path: Path) -> str | None:
    """Name of a checkpoint's stage; None for the last stage of a run."""
    match = NAME.fullmatch(path.name)
    return match[2] if match else None


def steps_of(path: Path) -> int:
    """Number of steps of a run's last stage that a checkpoint has; 0 for those of earlier stages."""
    match = NAME.fullmatch(path.name)
    return int(match[3]) if match and match[2] is None else 0


def prune(newest: Path, keep: int, keep_every: int) -> None:
    """Deletes superfluous checkpoints once `newest` is written; called on the main rank.

    Kept are `newest`, the newest `keep` between steps of its stage, and those whose step is a multiple of `keep_every`
    (0: none). Later checkpoints are damaged ones that the run fell back from; those of earlier stages, and within
    earlier steps, are no longer needed.
    """
    present = _by_moment(newest.parent)
    stage, now = _moment(newest)[0], _moment(newest)
    # A third component below 0 means between two steps; checkpoints within a step never count towards `keep`.
    steps = [p for p in present if _moment(p)[0] == stage and _moment(p)[2] < 0 and _moment(p) <= now]
    milestones = [path for path in steps if keep_every and _moment(path)[1] % keep_every == 0]
    for path in {*present} - {*milestones, *steps[-keep:], newest}:
        # Without its manifest a checkpoint counts as unfinished, however far the deletion gets.
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path)


def _by_moment(folder: Path) -> list[Path]:
    return sorted((p for p in folder.glob("*step-*") if NAME.fullmatch(p.name)), key=_moment)


def _moment(path: Path) -> tuple[int, int, int]:
    """Sort key of a checkpoint: stage, its steps, and updates of the next step (-1 if that was not begun)."""
    match = NAME.fullmatch(path.name)
    assert match, path
    return int(match[1] or LAST), int(match[3]), int(match[4] or -1)
