"""One checkpoint is one directory that is whole or not there.

    step-000020/  weights/  reference/  random/  state.json  manifest.json
    step-000020-updates-0003/  the same and step-in-progress.pt: the first three updates of step 21 are done
    1-pretrain-step-000200/  of an earlier stage of the run, the first

`weights` holds model and optimizer, `reference` the reference policy when there is one; both can be read under any
layout. `random` holds every rank's random number generators, `state.json` what else a run needs to go on,
`manifest.json` the checksums of all files. A checkpoint is written under a temporary name and renamed.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from torch.distributed.checkpoint.api import CheckpointException

from grpo_mega.checkpoint import random_state, reading, step_in_progress
from grpo_mega.checkpoint.integrity import MANIFEST, damage, seal, vouched
from grpo_mega.checkpoint.step_in_progress import StepInProgress
from grpo_mega.checkpoint.writers import ForkedQueue, finalized, start_results_queue, summing, waiting_on_hosts
from grpo_mega.models.policy import Policy
from grpo_mega.models.reference import ReferencePolicy
from grpo_mega.platform.collectives import if_all_can, main_says
from grpo_mega.platform.files import sync_folder, write_atomic
from grpo_mega.platform.orphans import forks_end_with_us
from grpo_mega.platform.stop import shielded_children

logger = logging.getLogger(__name__)

METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
STATE = "state.json"
NEEDED = (STATE, *(f"weights/{name}" for name in reading.NEEDED))
"""What the manifest of every checkpoint names."""
SECONDS_TO_MAKE_ROOM = 10
"""How long other ranks wait for the main rank to remove what was written of a checkpoint that failed."""
NAME = re.compile(r"(?:(\d+)-([a-z_]+)-)?step-(\d+)(?:-updates-(\d+))?")
"""Number and name of the stage, unless it is the last; steps; updates of the next step."""
LAST = 1000
"""Orders the last stage of a run after all others."""


class CannotSave(RuntimeError):
    """A checkpoint could not be written: nothing of it is left, and the ones before it are whole."""


def save(path: Path, policy: Policy, state: dict[str, Any], reference: ReferencePolicy | None = None) -> None:
    """Writes a checkpoint; every rank must call it. `state` is plain JSON, the same on every rank.

    Raises:
        CannotSave: The disk is full or failed, on any rank; raised on every rank that is still alive.
    """
    Saving(path, policy, state, reference, background=False).finish()


class Saving:
    """A checkpoint being written, in the `background` while training goes on; every rank must make and finish it.

    It holds what was true when this was made: the processes that write are forks, and share no later change. The
    reference policy, which changes seldom, and everything small is written before the constructor returns. Both
    methods may raise `CannotSave`, as `save` does.
    """

    def __init__(
        self,
        path: Path,
        policy: Policy,
        state: dict[str, Any],
        reference: ReferencePolicy | None,
        background: bool,
        rest: StepInProgress | None = None,
    ) -> None:
        self.path = path
        self.is_main = policy.topology.is_main
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._writers = AsyncCallsQueue()
        self._sums = ForkedQueue()
        with self._nothing_left_on_failure(), shielded_children(), forks_end_with_us():
            start_results_queue()
            if_all_can(lambda: _begin(self._temporary, state, reference, rest) if self.is_main else None)
            if_all_can(lambda: random_state.save(self._temporary))
            if reference:
                with reference.in_place():
                    waiting_on_hosts(self._written(_model(policy), "reference")).execute_sync()
            weights = _weights(policy, is_loading=False)
            _take_hollow(weights)
            # What only the main rank writes may fail on it alone. It then leaves, and the others with it: their
            # connection to it breaks. What any rank writes is checked by Megatron, on all of them.
            written = self._written(weights, "weights")
            if background:
                self._writers.schedule_async_request(written)
            else:
                waiting_on_hosts(written).execute_sync()

    def finish(self, wait: bool = True) -> bool:
        """Seals the checkpoint and gives it its name; False when files are still being written and `wait` is false."""
        with self._nothing_left_on_failure():
            if not finalized(self._writers, wait):
                return False
            sums = {f"{part}/{name}": s for part, found in self._sums.all() for name, s in found.items()}
            seal(self._temporary, sums)
            self._sums.close()
            if_all_can(lambda: _rename(self._temporary, self.path) if self.is_main else None)
            return True

    def _written(self, state: dict[str, Any], part: str) -> AsyncRequest:
        """What writes this rank's share of a state into a folder of the checkpoint, and its checksums into `_sums`."""
        folder = self._temporary / part
        request = dist_checkpointing.save(state, str(folder), async_sharded_save=True, content_metadata=METADATA)
        return summing(request, folder, self._sums)

    @contextmanager
    def _nothing_left_on_failure(self) -> Iterator[None]:
        try:
            yield
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            why = _cause(error, self.path)
            if self.is_main:
                shutil.rmtree(self._temporary, ignore_errors=True)
            else:
                _wait_until_gone(self._temporary)
            raise CannotSave(why) from error


def _begin(
    temporary: Path, state: dict[str, Any], reference: ReferencePolicy | None, rest: StepInProgress | None
) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    for folder in ("weights", random_state.FOLDER, *(["reference"] if reference else [])):
        (temporary / folder).mkdir(parents=True)
    write_atomic(temporary / STATE, json.dumps(state, indent=2))
    if rest:
        step_in_progress.save(temporary, rest)


def _rename(temporary: Path, path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
    temporary.rename(path)
    sync_folder(path.parent)


def _wait_until_gone(temporary: Path) -> None:
    """Gives the main rank time to make room: logs may lie on the same full disk, and could not say what happened."""
    end = time.monotonic() + SECONDS_TO_MAKE_ROOM
    while temporary.exists() and time.monotonic() < end:
        time.sleep(0.1)


def _cause(error: BaseException, path: Path) -> str:
    """What went wrong, how much room there is, and what to do."""
    if isinstance(error, CheckpointException):  # whose own text is a traceback per rank
        said = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items()) or "see rank 0"
    else:
        said = f"{type(error).__name__}: {error}"
    return (
        f"the checkpoint {path} cannot be written: {said}. {shutil.disk_usage(path.parent).free:,} bytes are free in "
        f"{path.parent}. Nothing of it is left and earlier checkpoints are whole: make room, or lower "
        "run.keep_checkpoints, and start the same command again"
    )


def load(path: Path, policy: Policy, reference: ReferencePolicy | None = None) -> dict[str, Any]:
    """Reads a checkpoint into policy, optimizer (when the policy has one) and reference; returns its state.

    Only files are read that its manifest names, and nothing in them is executed.

    Raises:
        FileNotFoundError: There is no checkpoint at `path`.
        ValueError: It holds no reference policy although one is wanted, or something that would be executed.
    """
    if not (path / STATE).is_file():
        raise FileNotFoundError(f"{path} holds no checkpoint (no {STATE})")
    files = vouched(path)
    wanted = _weights(policy, is_loading=True)
    hollow = _take_hollow(wanted)
    loaded = reading.load_sharded(wanted, path, "weights", files)
    _put_back(loaded, hollow)
    policy.chunks.load_state_dict(loaded["model"], strict=True)
    if policy.optimizer is not None:
        with torch.no_grad():
            policy.optimizer.load_state_dict(loaded["optimizer"])
    if reference:
        if f"reference/{reading.INDEX}" not in files:
            raise ValueError(f"{path} holds no reference policy; it was saved with algorithm.kl_coef=0")
        with reference.in_place():
            loaded = reading.load_sharded(_model(policy), path, "reference", files)
            policy.chunks.load_state_dict(loaded["model"], strict=True)
    return json.loads((path / STATE).read_text())


def load_weights(path: Path, policy: Policy) -> dict[str, Any]:
    """Reads only the model's weights into a policy without optimizer, for a run that starts from them.

    Raises:
        FileNotFoundError: There is no checkpoint at `path`.
        ValueError: The checkpoint is damaged.
    """
    assert policy.optimizer is None, "an optimizer made before would keep the old master weights"
    if problem := damage(path, NEEDED) if main_says((path / STATE).is_file) else None:
        raise ValueError(f"the checkpoint {path} is damaged: {problem}; delete it or name another one")
    return load(path, policy)


def newest_whole(folder: Path) -> Path | None:
    """The latest checkpoint that is whole, or None when none was ever finished; every rank must call it.

    A damaged one is left alone, with a warning that names it and the one that is used instead.

    Raises:
        ValueError: There are finished checkpoints, but all of them are damaged.
    """
    damaged: dict[Path, str] = {}
    for path in reversed(main_says(lambda: _by_moment(folder))):
        rest = (step_in_progress.FILE,) if _moment(path)[2] >= 0 else ()
        problem = damage(path, NEEDED + rest)
        if problem is None:
            for other, why in damaged.items():
                logger.warning("the checkpoint %s is damaged (%s); using %s instead", other, why, path)
            return path
        damaged[path] = problem
    if main_says(lambda: any((path / MANIFEST).exists() for path in damaged)):
        found = "; ".join(f"{path}: {why}" for path, why in damaged.items())
        raise ValueError(f"every checkpoint is damaged: {found}. Restore one, or delete {folder} to start anew")
    return None


def step_path(
    folder: Path, step: int, rest: StepInProgress | None = None, earlier_stage: tuple[int, str] | None = None
) -> Path:
    """Where the checkpoint of a step lies; with a `rest`, the one between it and the next.

    `earlier_stage` is the number (from 1) and the name of a stage that others follow.
    """
    stage = f"{earlier_stage[0]}-{earlier_stage[1]}-" if earlier_stage else ""
    return folder / (f"{stage}step-{step:06d}" + (f"-updates-{len(rest.updates):04d}" if rest else ""))


def stage_of(path: Path) -> str | None:
    """The name of the stage that a checkpoint is of; None for the last stage of a run."""
    match = NAME.fullmatch(path.name)
    return match[2] if match else None


def prune(newest: Path, keep: int, keep_every: int) -> None:
    """Deletes what is not to be kept once the checkpoint `newest` is written; called on the main rank.

    Of its stage, it and the newest `keep` between steps are kept, and those whose step is a multiple of `keep_every`
    (0: none). Later checkpoints are damaged ones that the run fell back from; those of earlier stages, and within
    earlier steps, have served.
    """
    present = _by_moment(newest.parent)
    stage, now = _moment(newest)[0], _moment(newest)
    steps = [p for p in present if _moment(p)[0] == stage and _moment(p)[2] < 0 and _moment(p) <= now]
    milestones = [path for path in steps if keep_every and _moment(path)[1] % keep_every == 0]
    for path in {*present} - {*milestones, *steps[-keep:], newest}:
        # Without its manifest a checkpoint counts as never finished, however far the deletion gets.
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path)


def _by_moment(folder: Path) -> list[Path]:
    return sorted((p for p in folder.glob("*step-*") if NAME.fullmatch(p.name)), key=_moment)


def _moment(path: Path) -> tuple[int, int, int]:
    """How far the run had come: stage, its steps, and updates of the next one; -1 when that was not begun."""
    match = NAME.fullmatch(path.name)
    assert match, path
    return int(match[1] or LAST), int(match[3]), int(match[4] or -1)


def _model(policy: Policy) -> dict[str, Any]:
    policy.gather_parameters()  # to be read whole, or to be replaced without a gather still under way
    return {"model": policy.chunks.sharded_state_dict(metadata=dict(METADATA))}


def _weights(policy: Policy, is_loading: bool) -> dict[str, Any]:
    state = _model(policy)
    if policy.optimizer is not None:
        state["optimizer"] = policy.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=dict(METADATA))
    return state


def _take_hollow(state: dict[Any, Any]) -> dict[Any, Any]:
    """Takes the containers that hold no leaf out of a nested state, and returns them under the same keys.

    Megatron has one optimizer for dense and one for expert parameters. Where a pipeline stage has no experts, the
    second one's state is empty: Megatron loses it on loading, but insists on finding it; and, saved by the main rank,
    it is in the way of the experts of other layouts.
    """
    taken = {key: state.pop(key) for key in [*state] if _is_hollow(state[key])}
    inside = {key: _take_hollow(value) for key, value in state.items() if isinstance(value, dict)}
    return taken | {key: found for key, found in inside.items() if found}


def _is_hollow(value: Any) -> bool:
    if not isinstance(value, dict | list):
        return False
    return all(_is_hollow(part) for part in (value.values() if isinstance(value, dict) else value))


def _put_back(loaded: dict[Any, Any], hollow: dict[Any, Any]) -> None:
    """Adds what `_take_hollow` took to what was loaded."""
    for key, value in hollow.items():
        if key not in loaded:
            loaded[key] = value
        elif isinstance(value, dict):
            _put_back(loaded[key], value)
