"""Expected contents of a model's checkpoint, for writing a new one and for checking an existing one without reading
weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from grpo_mega import platform
from grpo_mega.checkpoint import safe_load
from grpo_mega.checkpoint.checkpoint import STATE
from grpo_mega.checkpoint.model_state import METADATA, POLICY, refuse_adapters
from grpo_mega.checkpoint.safe_load import INDEX, read_index
from grpo_mega.config.schema import LayoutConfig, ModelConfig
from grpo_mega.errors import InputError
from grpo_mega.models.body import build_model
from grpo_mega.models.shards import plain_name
from grpo_mega.models.topology import make_groups
from grpo_mega.platform.manifest import MANIFEST, damage_beside_weights, read_manifest

Part: TypeAlias = ShardedTensor | ShardedObject
SHOWN = 3
"""Number of mismatched tensors that an error names."""
ANOTHER = "of another model than the configuration"


def parts(model: ModelConfig, vocab_size: int, here: platform.Platform) -> list[Part]:
    """Tensors of a checkpoint of the model; `here` has the meta device, and the layout is of one process."""
    # The layout of one process gives every tensor in one piece, and the index stores whole shapes, so one layout serves
    # to check checkpoints of all.
    chunks = build_model(model, LayoutConfig(), vocab_size, here)
    state = {"model": chunks.sharded_state_dict(metadata=dict(METADATA))}
    apply_factories(state)
    return [part for part in nested_values(state) if isinstance(part, ShardedTensor | ShardedObject)]


def check_files(path: Path, folder: str = POLICY) -> None:
    """Checks that every file of the models in a checkpoint exists with its size, including those of `folder`.

    Checksums, of possibly terabytes, are left to the run that reads them.

    Raises:
        InputError: A file is missing or has another size; names it.
    """
    manifest = read_manifest(path)
    if problem := manifest if isinstance(manifest, str) else _missing(path, manifest, folder):
        raise InputError(str(path), f"the checkpoint is damaged: {problem}", "restore it, or choose another")


def check_beside_weights(path: Path) -> None:
    """Checks that files other than the weights, such as a tokenizer's, are unchanged since the checkpoint was written.

    Raises:
        InputError: A file is missing or has changed; names it.
    """
    if problem := damage_beside_weights(path):
        raise InputError(str(path), f"the checkpoint is damaged: {problem}", "restore it, or choose another")


def _missing(path: Path, manifest: dict[str, tuple[int, str]], folder: str) -> str | None:
    """First file in a folder of the checkpoint that is missing or incomplete."""
    needed = (STATE, *(f"{folder}/{name}" for name in safe_load.NEEDED))
    if unnamed := [name for name in needed if name not in manifest]:
        return f"its {MANIFEST} does not name {unnamed[0]}"
    for name, (size, _) in manifest.items():
        # Files outside of folders are left to `check_beside_weights`, which compares their checksums.
        if "/" in name and not (path / name).is_file():
            return f"{name} is missing"
        if "/" in name and (there := (path / name).stat().st_size) != size:
            return f"{name} has {there} bytes instead of {size}"
    return None


def check_weights(path: Path, model: ModelConfig, vocab_size: int) -> None:
    """Checks that a checkpoint holds the tensors of the model in their shapes; reads only its index.

    Call `platform.start_planning` first; this process must be in no process group.

    Raises:
        InputError: The checkpoint holds adapters, or tensors are missing or of other shapes; names the first.
    """
    refuse_adapters(path, POLICY)
    index = read_index(path / POLICY / INDEX).state_dict_metadata
    tensors = {key: entry for key, entry in index.items() if isinstance(entry, TensorStorageMetadata)}
    # Plain names make checkpoints written with and without Transformer Engine comparable: it fuses norms into the next
    # layer, under other keys.
    there = {plain_name(key): tuple(entry.size) for key, entry in tensors.items()}
    wanted = _shapes(model, vocab_size)
    if missing := sorted(wanted.keys() - there.keys()):
        what = f"{ANOTHER}: {len(missing)} tensors are missing, the first: {missing[0]}"
        raise InputError(str(path), what, "choose the model that it was trained with")
    if unlike := [key for key, shape in wanted.items() if there[key] != shape]:
        shown = "; ".join(f"{key} is {there[key]}, not {wanted[key]}" for key in unlike[:SHOWN])
        what = f"{ANOTHER}: {len(unlike)} tensors have other shapes: {shown}"
        raise InputError(str(path), what, "choose the model, and the tokenizer, that it was trained with")


def _shapes(model: ModelConfig, vocab_size: int) -> dict[str, tuple[int, ...]]:
    # Megatron builds models only inside process groups. They are torn down again, so that a later call can create
    # others.
    here = platform.pretend_rank(0, 1)
    make_groups(LayoutConfig(), seed=0, pretended=True)
    try:
        wanted = parts(model, vocab_size, here)
        return {plain_name(part.key): tuple(part.global_shape) for part in wanted if isinstance(part, ShardedTensor)}
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
