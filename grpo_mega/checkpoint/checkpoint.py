"""One checkpoint is one directory that is whole or not there.

    step-000020/  weights/  reference/  state.json

`weights` holds model and optimizer, `reference` the reference policy when there is one; both can be read under any
layout. `state.json` holds what else a run needs to go on. A checkpoint is written under a temporary name and renamed.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from grpo_mega.observe.files import sync_folder, write_atomic
from grpo_mega.policy.policy import Policy
from grpo_mega.policy.reference import ReferencePolicy

METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
STATE = "state.json"


def save(path: Path, policy: Policy, state: dict[str, Any], reference: ReferencePolicy | None = None) -> None:
    """Writes a checkpoint; called on every rank. `state` is plain JSON, the same on every rank."""
    temporary = path.with_name(f".{path.name}.tmp")
    if policy.topology.is_main:
        shutil.rmtree(temporary, ignore_errors=True)
        for folder in ("weights", *(["reference"] if reference else [])):
            (temporary / folder).mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(_weights(policy, is_loading=False), str(temporary / "weights"), content_metadata=METADATA)
    if reference:
        with reference.in_place():
            dist_checkpointing.save(_model(policy), str(temporary / "reference"), content_metadata=METADATA)
    if policy.topology.is_main:
        write_atomic(temporary / STATE, json.dumps(state, indent=2))
        if path.exists():
            shutil.rmtree(path)
        temporary.rename(path)
        sync_folder(path.parent)
    dist.barrier()


def load(path: Path, policy: Policy, reference: ReferencePolicy | None = None) -> dict[str, Any]:
    """Reads a checkpoint into policy, optimizer (when the policy has one) and reference; returns its state.

    Raises:
        FileNotFoundError: There is no whole checkpoint at `path`.
        ValueError: It holds no reference policy although one is wanted.
    """
    if not (path / STATE).is_file():
        raise FileNotFoundError(f"{path} holds no whole checkpoint (no {STATE})")
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
    return read_state(path)


def read_state(path: Path) -> dict[str, Any]:
    """The state a checkpoint was saved with."""
    return json.loads((path / STATE).read_text())


def load_weights(path: Path, policy: Policy) -> dict[str, Any]:
    """Reads only the model's weights, for a run that starts from them; the optimizer starts anew.

    Raises:
        FileNotFoundError: There is no whole checkpoint at `path`.
    """
    optimizer, policy.optimizer = policy.optimizer, None
    try:
        return load(path, policy)
    finally:
        policy.optimizer = optimizer
        if optimizer is not None:
            optimizer.reload_model_params()


def newest(folder: Path) -> Path | None:
    """The whole checkpoint of the latest step in a folder of checkpoints."""
    return max((p for p in folder.glob("step-*") if (p / STATE).is_file()), default=None)


def step_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"step-{step:06d}"


def prune(folder: Path, keep: int) -> None:
    """Deletes all but the newest `keep` checkpoints; called on the main rank."""
    for path in sorted(p for p in folder.glob("step-*") if (p / STATE).is_file())[:-keep]:
        shutil.rmtree(path)


def _model(policy: Policy) -> dict[str, Any]:
    return {"model": policy.gpt.sharded_state_dict(metadata=METADATA)}


def _weights(policy: Policy, is_loading: bool) -> dict[str, Any]:
    state = _model(policy)
    if policy.optimizer is not None:
        state["optimizer"] = policy.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=METADATA)
    return state
