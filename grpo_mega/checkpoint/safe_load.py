"""Safe reading of tensors from untrusted files: nothing in them is executed.

A pickle can name any function and have it called. torch.load has a tensors-only mode, but torch does not use it for
sharded checkpoints: their index (`.metadata`) is unpickled without it, and so are objects between the tensors
(`*.distcp`); Transformer Engine unpickles bytes in tensors. Here the index is read by an unpickler that knows only the
classes of an index, torch.load is forced into its tensors-only mode, and state of FP8 training is refused.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.base import StrategyAction, get_default_strategy
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from grpo_mega.errors import InputError

ANOTHER = "restore the checkpoint, or choose another"
INDEX = ".metadata"
NEEDED = (INDEX, "common.pt", "metadata.json")
"""Files of every Megatron checkpoint folder that the index does not name."""
FORMAT = ("torch_dist", 1), ("torch", 1)
"""Accepted Megatron formats of sharded and of common data; any other would be read by code that is not guarded here."""
FORCED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""Environment variable that forces torch.load into the mode that executes nothing, whatever the caller asks for."""

RECORDS = (
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorProperties,
    metadata.TensorStorageMetadata,
    metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
    filesystem._StoragePrefix,
    planner.BytesIOWriteData,
    planner.SavePlan,
    planner.TensorWriteData,
    planner.WriteItem,
    planner.WriteItemType,
)
"""torch's classes of an index, all plain records of values; releases from 2.11 on use no others."""
OF_AN_INDEX: dict[tuple[str, str], Any] = {
    **{(record.__module__, record.__name__): record for record in RECORDS},
    **{("torch", name): dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
}
"""{(module, name): object} that an index may refer to; the last one looks a layout up by name."""


class _IndexUnpickler(pickle.Unpickler):
    """An unpickler that knows only the classes of an index, so that a pickle can call nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return OF_AN_INDEX[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"Unsupported global: GLOBAL {module}.{name}") from None


def load_tensors(file: Path, mapped: bool = False) -> Any:
    """Loads a file of torch.save to the CPU; with `mapped`, tensors are memory-mapped and read on access.

    Raises:
        InputError: The file contains more than tensors and plain values.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise _refusal(file, error) from error


def load_sharded(state: dict[str, Any], checkpoint: Path, part: str, files: set[str]) -> dict[str, Any]:
    """Loads the shards requested in `state` from the folder `part` of a checkpoint, through Megatron.

    Every rank must call it. Megatron reads a folder of links to those of the checkpoint's `files` (relative names) that
    belong to the part, with an index rebuilt from the checked one: exactly what was checked is read.

    Raises:
        InputError: A file holds more than tensors and plain values, or is missing in `files`; on every rank.
    """
    # First everything is checked that needs no Megatron: the index, and that the manifest names every file that it
    # refers to.
    folder = checkpoint / part
    index = read_index(folder / INDEX)
    names = _named(folder, index)
    if unknown := [name for name in (*NEEDED, *names) if f"{part}/{name}" not in files]:
        what = "needed, and the checkpoint's manifest does not name it"
        raise InputError(str(folder / unknown[0]), what, ANOTHER)
    # Loaded here only for its error: Megatron would not say which file cannot be read.
    load_tensors(folder / "common.pt")
    # Then Megatron reads a folder that contains nothing unchecked, so that a file added to the checkpoint meanwhile, or
    # an index replaced after the check, has no effect.
    with TemporaryDirectory(prefix="checkpoint-") as temporary, _tensors_only():
        shown = Path(temporary)
        (shown / INDEX).write_bytes(pickle.dumps(index))
        for name in {*NEEDED, *names} - {INDEX}:
            (shown / name).symlink_to((folder / name).resolve())
        sharded, common = (
            # The strategies are fixed instead of chosen by the checkpoint's metadata.json, which would let a file
            # select the code that reads it.
            get_default_strategy(action, *how)
            for action, how in zip((StrategyAction.LOAD_SHARDED, StrategyAction.LOAD_COMMON), FORMAT, strict=True)
        )
        try:
            loaded = dist_checkpointing.load(state, temporary, sharded, common)
        except CheckpointException as error:
            # CheckpointException derives from BaseException.
            raise _explained(error, folder, index) from error
    _refuse_fp8_state(folder, loaded)
    return loaded


def read_index(file: Path) -> Metadata:
    """Reads torch's index of the tensors in a folder without executing anything.

    Raises:
        InputError: The file is missing, or contains more than such an index.
    """
    try:
        with file.open("rb") as content:
            index = _IndexUnpickler(content).load()
    except FileNotFoundError:
        raise InputError(str(file), "missing", ANOTHER) from None
    except Exception as error:
        # An invalid pickle may raise any exception.
        raise _refusal(file, error) from error
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
        raise InputError(str(file), "not the index of a torch checkpoint", ANOTHER)
    # The plans say which rank wrote what: they are large, and unused in reading.
    vars(index).pop("all_local_plans", None)
    return index


def _named(folder: Path, index: Metadata) -> list[str]:
    """Files named by an index, all of them in its folder."""
    names = set()
    for entry in index.storage_data.values():
        name = getattr(entry, "relative_path", None)
        # A path with folders, such as ../../etc, would lead out of the checkpoint.
        if not isinstance(name, str) or Path(name).name != name:
            raise InputError(str(folder / INDEX), f"names {name!r}, which is not a file of its folder", ANOTHER)
        names.add(name)
    return sorted(names)


@contextmanager
def _tensors_only() -> Iterator[None]:
    """Context that forces torch.load into its tensors-only mode."""
    before = os.environ.get(FORCED)
    os.environ[FORCED] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[FORCED]
        else:
            os.environ[FORCED] = before


def _refuse_fp8_state(folder: Path, state: dict[Any, Any]) -> None:
    """Refuses bytes that Transformer Engine would unpickle; models not trained in FP8 have none."""
    for key, value in state.items():
        if isinstance(value, dict):
            _refuse_fp8_state(folder, value)
        elif str(key).endswith("_extra_state") and isinstance(value, torch.Tensor) and value.numel():
            # Megatron stores an empty tensor for a missing state, which is harmless.
            what = f"it has state of FP8 training ({key}), which Transformer Engine would execute"
            raise InputError(str(folder), what, "choose a checkpoint without it: models trained here have none")


def _explained(error: CheckpointException, folder: Path, index: Metadata) -> Exception:
    """An error that names the file with more than tensors and plain values, if that was the cause."""
    failures = [failure[0] for failure in error.failures.values()]
    # torch names no file in this error, so the stored objects are read once more, one by one, until one is refused.
    for entry in index.storage_data.values() if any(isinstance(f, pickle.UnpicklingError) for f in failures) else ():
        file = folder / entry.relative_path
        with file.open("rb") as content:
            content.seek(entry.offset)
            inside = BytesIO(content.read(entry.length))
        try:
            torch.load(inside, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as refused:
            return _refusal(file, refused)
    reasons = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items()) or "see rank 0"
    return RuntimeError(f"{folder} cannot be read: {reasons}")


def _refusal(file: Path, error: Exception) -> InputError:
    match = re.search(r"GLOBAL (\S+)", str(error))
    # torch's message also explains how to turn the protection off, which must not be suggested here.
    reason = re.sub(r"(?s).*WeightsUnpickler error: (.*?)\n.*", r"\1", str(error))
    what = f"names {match[1]}, which no checkpoint needs" if match else f"cannot be read ({reason})"
    return InputError(str(file), f"{what}; nothing in it was executed", "take a checkpoint from a source you trust")
