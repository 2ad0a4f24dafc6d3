"""One checkpoint is one directory that is whole or not there.

    step-000020/  weights/  reference/  state.json  manifest.json

`weights` holds model and optimizer, `reference` the reference policy when there is one; both can be read under any
layout. `state.json` holds what else a run needs to go on, `manifest.json` the checksums of all files. A checkpoint is
written under a temporary name and renamed.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from grpo_mega.checkpoint.integrity import MANIFEST, damage, main_says, seal
from grpo_mega.observe.files import sync_folder, write_atomic
from grpo_mega.platform.stop import shielded_children
from grpo_mega.policy.policy import Policy
from grpo_mega.policy.reference import ReferencePolicy

logger = logging.getLogger(__name__)

METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
STATE = "state.json"


def save(path: Path, policy: Policy, state: dict[str, Any], reference: ReferencePolicy | None = None) -> None:
    """Writes a checkpoint; every rank must call it. `state` is plain JSON, the same on every rank."""
    temporary = path.with_name(f".{path.name}.tmp")
    if policy.topology.is_main:
        shutil.rmtree(temporary, ignore_errors=True)
        for folder in ("weights", *(["reference"] if reference else [])):
            (temporary / folder).mkdir(parents=True)
        write_atomic(temporary / STATE, json.dumps(state, indent=2))
    dist.barrier()
    with shielded_children():
        dist_checkpointing.save(
            _weights(policy, is_loading=False), str(temporary / "weights"), content_metadata=METADATA
        )
        if reference:
            with reference.in_place():
                dist_checkpointing.save(_model(policy), str(temporary / "reference"), content_metadata=METADATA)
    seal(temporary)
    if policy.topology.is_main:
        if path.exists():
            shutil.rmtree(path)
        temporary.rename(path)
        sync_folder(path.parent)
    dist.barrier()


def load(path: Path, policy: Policy, reference: ReferencePolicy | None = None) -> dict[str, Any]:
    """Reads a checkpoint into policy, optimizer (when the policy has one) and reference; returns its state.

    Raises:
        FileNotFoundError: There is no checkpoint at `path`.
        ValueError: It holds no reference policy although one is wanted.
    """
    if not (path / STATE).is_file():
        raise FileNotFoundError(f"{path} holds no checkpoint (no {STATE})")
    loaded = dist_checkpointing.load(_weights(policy, is_loading=True), str(path / "weights"))
    policy.gpt.load_state_dict(loaded["model"], strict=True)
    if policy.optimizer is not None:
        with torch.no_grad():
            policy.optimizer.load_state_dict(loaded["optimizer"])
    if reference:
        if not (path / "reference").is_dir():
            raise ValueError(f"{path} holds no reference policy; it was saved with algorithm.kl_coef=0")
        with reference.in_place():
            loaded = dist_checkpointing.load(_model(policy), str(path / "reference"))
            policy.gpt.load_state_dict(loaded["model"], strict=True)
    return json.loads((path / STATE).read_text())


def load_weights(path: Path, policy: Policy) -> dict[str, Any]:
    """Reads only the model's weights into a policy without optimizer, for a run that starts from them.

    Raises:
        FileNotFoundError: There is no checkpoint at `path`.
        ValueError: The checkpoint is damaged.
    """
    assert policy.optimizer is None, "an optimizer made before would keep the old master weights"
    if problem := damage(path) if main_says((path / STATE).is_file) else None:
        raise ValueError(f"the checkpoint {path} is damaged: {problem}; delete it or name another one")
    return load(path, policy)


def newest_whole(folder: Path) -> Path | None:
    """The checkpoint of the latest step that is whole, or None when none was ever finished; every rank must call it.

    A damaged one is left alone, with a warning that names it and the one that is used instead.

    Raises:
        ValueError: There are finished checkpoints, but all of them are damaged.
    """
    damaged: dict[Path, str] = {}
    for path in reversed(main_says(lambda: _by_step(folder))):
        problem = damage(path)
        if problem is None:
            for other, why in damaged.items():
                logger.warning("the checkpoint %s is damaged (%s); using %s instead", other, why, path)
            return path
        damaged[path] = problem
    if main_says(lambda: any((path / MANIFEST).exists() for path in damaged)):
        found = "; ".join(f"{path}: {why}" for path, why in damaged.items())
        raise ValueError(f"every checkpoint is damaged: {found}. Restore one, or delete {folder} to start anew")
    return None


def step_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"step-{step:06d}"


def prune(folder: Path, step: int, keep: int, keep_every: int) -> None:
    """Deletes what is not to be kept once the checkpoint of `step` is written; called on the main rank.

    Kept are the newest `keep` and every one whose step is a multiple of `keep_every` (0: none). Checkpoints of later
    steps are damaged ones that the run fell back from.
    """
    present = _by_step(folder)
    past = [path for path in present if _step(path) <= step]
    old = [path for path in past[:-keep] if not (keep_every and _step(path) % keep_every == 0)]
    for path in old + present[len(past) :]:
        # Without its manifest a checkpoint counts as never finished, however far the deletion gets.
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path)


def _by_step(folder: Path) -> list[Path]:
    return sorted((p for p in folder.glob("step-*") if p.name[5:].isdigit()), key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _model(policy: Policy) -> dict[str, Any]:
    return {"model": policy.gpt.sharded_state_dict(metadata=METADATA)}


def _weights(policy: Policy, is_loading: bool) -> dict[str, Any]:
    state = _model(policy)
    if policy.optimizer is not None:
        state["optimizer"] = policy.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=METADATA)
    return state
