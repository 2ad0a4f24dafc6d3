"""Converts a Hugging Face folder to a checkpoint, tensor by tensor: no process ever holds the model.

The model is built without memory (`platform.start_planning`), which gives Megatron's tensor names and shards. Each part
is then read from the folder and written, in the format in which Megatron saves.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from grpo_mega.checkpoint.checkpoint import STATE
from grpo_mega.checkpoint.contents import Part, parts
from grpo_mega.checkpoint.integrity import seal
from grpo_mega.checkpoint.model_state import METADATA, POLICY
from grpo_mega.checkpoint.safe_load import FORMAT
from grpo_mega.config.schema import ModelConfig
from grpo_mega.errors import InputError
from grpo_mega.models.shards import named_box
from grpo_mega.platform import Platform
from grpo_mega.platform.files import make_new, only_one, sync_folder, write_atomic
from grpo_mega.weights.companions import CONFIG, GENERATION, TOKENIZER_FILES
from grpo_mega.weights.directory import EXISTS, Reader

BYTES_OF_A_FILE = 512 * 2**20
"""Size of a file in bytes. Several files rather than one, because ranks that read the checkpoint divide its files among
them to compute checksums."""


def import_folder(folder: Path, out: Path, model: ModelConfig, vocab_size: int, here: Platform) -> None:
    """Writes the weights of a folder as the checkpoint `out`, with its tokenizer and config.json.

    For one process, in a layout of one, after `platform.start_planning`; `here` has the meta device. Main memory: half
    a GiB, and twice the largest tensor.

    Raises:
        InputError: The folder is not of this model, or incomplete, or `out` exists, or another process is writing it;
            names the problem.
        OSError: The disk is full or failed. Nothing is left of `out`.
    """
    _refuse_existing(out)
    reader = Reader(folder, model, vocab_size)
    wanted = parts(model, vocab_size, here)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with only_one(out):
            # Checked again under the lock, as another process may just have finished it.
            _refuse_existing(out)
            _write_checkpoint(folder, out, wanted, reader)
    except (OSError, RuntimeError) as error:
        # While torch handles the disk's error it raises a RuntimeError; the disk's is the one to report.
        cause = error if isinstance(error, OSError) else error.__context__ or error
        # Some of the folders above may not exist, and disk_usage needs one that does.
        there = next(folder for folder in out.absolute().parents if os.path.isdir(folder))
        why = f"{cause}. {shutil.disk_usage(there).free:,} bytes were free in {there}"
        raise OSError(f"{out} cannot be written: {why}") from error


def _refuse_existing(out: Path) -> None:
    if out.exists():
        raise InputError(str(out), "exists", EXISTS)


def _write_checkpoint(folder: Path, out: Path, wanted: list[Part], reader: Reader) -> None:
    """Writes everything under a temporary name, then renames the folder."""
    temporary = out.with_name(f".{out.name}.tmp")
    out.parent.mkdir(parents=True, exist_ok=True)
    make_new(temporary)
    (temporary / POLICY).mkdir()
    try:
        # A lack of space is reported before the first byte is written rather than after hours.
        needed = sum(prod(part.local_shape) * part.dtype.itemsize for part in wanted if isinstance(part, ShardedTensor))
        if needed > shutil.disk_usage(out.parent).free:
            raise OSError(f"the weights take {needed:,} bytes: make room, or name a directory on another disk")
        _write(temporary / POLICY, wanted, reader)
        for name in (*TOKENIZER_FILES, GENERATION):
            if (folder / name).is_file():
                write_atomic(temporary / name, (folder / name).read_bytes())
        write_atomic(temporary / CONFIG, json.dumps(reader.config, indent=1))
        write_atomic(temporary / STATE, json.dumps({"imported_from": str(folder)}))
        # Sealed last: the manifest names every file, and a checkpoint without one counts as unfinished.
        seal(temporary)
        temporary.rename(out)
        sync_folder(out.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class _OnePartAtATime(DefaultSavePlanner):
    """Reads the shards for the writer one at a time, as they are needed."""

    def __init__(self, wanted: Iterable[Part], reader: Reader) -> None:
        super().__init__()
        self._parts = {_index(part): part for part in wanted}
        self._reader = reader

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Values of a shard."""
        part = self._parts[MetadataIndex(write_item.index.fqn, write_item.index.offset)]
        if isinstance(part, ShardedObject):
            content = io.BytesIO()
            # A list, as Megatron looks up all objects of this name that a rank has written.
            torch.save([part.data], content)
            return content
        return self._reader.part(*named_box(part), part.dtype).view(_sizes(part))


class _TensorWriter(FileSystemWriter):
    """Writes tensors as torch does, with an index of tensors only."""

    def storage_meta(self) -> None:
        """None: torch would record a Path here, and reading refuses everything but plain values."""


def _write(folder: Path, wanted: list[Part], reader: Reader) -> None:
    """Writes the shards into files of about `BYTES_OF_A_FILE`, and Megatron's further files."""
    listed = []
    for part in wanted:
        if isinstance(part, ShardedObject):
            listed.append(WriteItem(_index(part), WriteItemType.BYTE_IO))
            continue
        if named_box(part)[0] not in reader:
            raise ValueError(f"no Hugging Face tensor stands for {part.key}")
        chunk = ChunkStorageMetadata(torch.Size(part.global_offset), torch.Size(_sizes(part)))
        data = TensorWriteData(chunk, TensorProperties(part.dtype), torch.Size(part.global_shape))
        listed.append(WriteItem(_index(part), WriteItemType.SHARD, tensor_data=data))
    planner = _OnePartAtATime(wanted, reader)
    (plan,), metadata = create_default_global_save_plan([SavePlan(listed)])
    writer = _TensorWriter(folder)
    writer.set_up_storage_writer(True)
    results = []
    for number, items in enumerate(_files(plan.items)):
        one = SavePlan(items, storage_data=_StoragePrefix(f"__{number}_"))
        results.append(writer.write_data(one, planner).value())
    writer.finish(metadata, results)
    torch.save({"content_metadata": METADATA}, folder / "common.pt")
    # Reading accepts these formats only.
    (sharded, sharded_version), (common, common_version) = FORMAT
    save_config(CheckpointingConfig(sharded, sharded_version, common, common_version), str(folder))


def _files(items: list[WriteItem]) -> Iterator[list[WriteItem]]:
    """Yields the items of each file."""
    file: list[WriteItem] = []
    room = BYTES_OF_A_FILE
    for item in items:
        size = 0
        if item.tensor_data:
            size = torch.Size(item.tensor_data.chunk.sizes).numel() * item.tensor_data.properties.dtype.itemsize
        # A tensor that is larger than the limit fills a file by itself.
        if file and size > room:
            yield file
            file, room = [], BYTES_OF_A_FILE
        file.append(item)
        room -= size
    yield file


def _index(part: Part) -> MetadataIndex:
    if isinstance(part, ShardedObject):
        return MetadataIndex(part.unique_key)
    return MetadataIndex(part.key, torch.Size(part.global_offset))


def _sizes(part: ShardedTensor) -> tuple[int, ...]:
    """Sizes of a shard, including the axes that number layers and experts."""
    return (*(1 for _ in range(part.prepend_axis_num)), *part.local_shape)
