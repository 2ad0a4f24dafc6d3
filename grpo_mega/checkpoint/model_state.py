"""State of one model in a checkpoint, in its own folder: weights, and the optimizer's state if the model is trained."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from grpo_mega.checkpoint import random_state
from grpo_mega.checkpoint.safe_load import INDEX, load_sharded, read_index
from grpo_mega.errors import InputError
from grpo_mega.models.adapters import is_adapter
from grpo_mega.models.average import Copy
from grpo_mega.models.model import Model

# Tensors of the optimizer are stored under the names of their parameters, without the number of the optimizer that
# holds them: both would otherwise depend on the layout, and another layout could not read them.
METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
POLICY = "weights"
"""Folder of the policy; other models' folders are named by their role."""
RESERVED = (POLICY, random_state.FOLDER)
"""Folder names that no role may have."""
ROLE = re.compile("[a-z]+( [a-z]+)*")


def folder_of(role: str) -> str:
    """Folder of a role's model inside a checkpoint.

    Raises:
        InputError: The role is not made of lower-case letters and spaces, or its folder name is reserved.
    """
    if not ROLE.fullmatch(role) or role in RESERVED:
        fix = f"choose one of small letters and spaces other than {', '.join(RESERVED)}"
        raise InputError(f"the role {role!r} of a model", "cannot name its folder in checkpoints", fix)
    return POLICY if role == "policy" else role.replace(" ", "_")


def folders_of(models: Sequence[Model | Copy]) -> list[str]:
    """Folder of each model.

    Raises:
        InputError: Two models have the same role, or a role is not a valid folder name.
    """
    roles = [model.role for model in models]
    if len({*roles}) < len(roles):
        raise InputError(", ".join(roles), "two models of one checkpoint have the same role", "give each its own")
    return [folder_of(role) for role in roles]


def weights_of(model: Model) -> dict[str, Any]:
    """The model's weights in Megatron's format for saving and loading."""
    # A gather that is pending for the next forward pass would leave stale shards in what is saved, and overwrite what
    # is loaded.
    model.gather_parameters()
    return {"model": model.chunks.sharded_state_dict(metadata=dict(METADATA))}


def holds_adapters(checkpoint: Path, folder: str) -> bool:
    """Whether a folder of a checkpoint holds adapters, with or without other weights."""
    index = checkpoint / folder / INDEX
    return index.is_file() and any(is_adapter(str(key)) for key in read_index(index).state_dict_metadata)


def refuse_adapters(checkpoint: Path, folder: str) -> None:
    """Raises InputError for a model with adapters in a folder of a checkpoint, as a run cannot start from it."""
    if holds_adapters(checkpoint, folder):
        what = "it has weights and adapters apart (lora.rank above 0)"
        fix = "write them as one model with tools/export.py, and start from that folder"
        raise InputError(str(checkpoint), what, fix)


def state_to_save(model: Model) -> dict[str, Any]:
    """The model's weights, and the optimizer's state if it has one, in Megatron's format."""
    state = _state_of(model, is_loading=False)
    _take_hollow(state)
    return state


def load_into(model: Model | Copy, checkpoint: Path, folder: str, files: set[str]) -> None:
    """Reads a folder of a checkpoint into the model and its optimizer (if it has one); every rank must call it.

    `files` are the files in the checkpoint's manifest.

    Raises:
        InputError: The folder is missing, or contains something that would be executed.
    """
    if f"{folder}/{INDEX}" not in files:
        what = (
            f"it has no {model.role} (no {folder}/), as the run that saved it had none (a reference needs "
            "algorithm.kl_coef above 0, an average optimizer.average_decay)"
        )
        raise InputError(str(checkpoint), what, "choose a checkpoint that has one, or the settings of that run")
    if isinstance(model, Copy):
        with model.saved():
            # A copy (reference, average) is loaded by way of the policy's model, whose parameters it is inside `saved`.
            loaded = load_sharded(weights_of(model.policy), checkpoint, folder, files)
            model.policy.chunks.load_state_dict(loaded["model"], strict=True)
        return
    # Empty containers take no part in the loading (see `_take_hollow`), but the optimizer expects to find them in its
    # state.
    wanted = _state_of(model, is_loading=True)
    hollow = _take_hollow(wanted)
    loaded = load_sharded(wanted, checkpoint, folder, files)
    _put_back(loaded, hollow)
    model.chunks.load_state_dict(loaded["model"], strict=True)
    if model.optimizer is not None:
        with torch.no_grad():
            model.optimizer.load_state_dict(loaded["optimizer"])


def _state_of(model: Model, is_loading: bool) -> dict[str, Any]:
    state = weights_of(model)
    if model.optimizer is not None:
        state["optimizer"] = model.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=dict(METADATA))
    return state


def _take_hollow(state: dict[Any, Any]) -> dict[Any, Any]:
    """Removes containers without leaves from a nested state, and returns them under the same keys.

    Megatron has one optimizer for dense and one for expert parameters. Where a pipeline stage has no experts, the
    second one's state is empty: Megatron drops it on loading, yet requires it; and, saved by the main rank, it
    conflicts with the experts of other layouts.
    """
    taken = {key: state.pop(key) for key in [*state] if _is_hollow(state[key])}
    inside = {key: _take_hollow(value) for key, value in state.items() if isinstance(value, dict)}
    return taken | {key: hollow for key, hollow in inside.items() if hollow}


def _is_hollow(value: Any) -> bool:
    if not isinstance(value, dict | list):
        return False
    return all(_is_hollow(part) for part in (value.values() if isinstance(value, dict) else value))


def _put_back(loaded: dict[Any, Any], hollow: dict[Any, Any]) -> None:
    """Adds the containers removed by `_take_hollow` to the loaded state."""
    for key, value in hollow.items():
        if key not in loaded:
            loaded[key] = value
        elif isinstance(value, dict):
            _put_back(loaded[key], value)
