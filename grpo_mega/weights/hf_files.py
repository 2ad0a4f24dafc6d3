"""Checks and reads the tensors in the files of a Hugging Face model directory.

Tensors may be unquantised, in fp8 (`fp8.py`), or in 4 bits (`mxfp4.py`).
"""

from __future__ import annotations

import logging
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from grpo_mega.models.shards import Box
from grpo_mega.weights import fp8, mxfp4
from grpo_mega.weights.companions import CONFIG
from grpo_mega.weights.names import NamedTensor, Region

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
COMPUTED = ".rotary_emb.inv_freq"
"""Suffix of tensors that early Llama folders store although they follow from the configuration; they are ignored."""
AGAIN = "download the folder again, or choose another"


class Unusable(Exception):
    """A directory cannot be read: what is wrong, and what to do. The caller adds the directory (`InputError`)."""

    def __init__(self, what: str, fix: str = AGAIN) -> None:
        super().__init__(what, fix)
        self.what, self.fix = what, fix


Header = tuple[list[int], str]
"""Shape and dtype of a tensor in a file."""


def headers(file: Path) -> dict[str, Header]:
    """{name: (shape, dtype)} of the tensors in a file.

    Raises:
        Unusable: The file cannot be read.
    """
    try:
        with safe_open(file, "pt") as content:
            slices = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118
            return {name: (s.get_shape(), s.get_dtype()) for name, s in slices.items()}
    except (SafetensorError, OSError) as error:
        raise Unusable(f"{file.name}: {error}") from error


def file_of(entry: NamedTensor, files: dict[str, str]) -> str:
    """File of a tensor (of its numbers, if scales are separate); `files` is {tensor name: file}."""
    return files[entry.name] if entry.name in files else files[entry.name + mxfp4.BLOCKS]


def fill(parts: dict[Box, torch.Tensor], entry: NamedTensor, content: Any, path: Path, files: dict[str, str]) -> None:
    """Copies one tensor of an open file into the shards of the Megatron tensor that hold it."""
    # After `check_tensors` a missing name can only mean that the tensor is stored as blocks and scales.
    in_mxfp4 = entry.name not in files
    # The dtype in the file decides, not config.json: in an fp8 model most small tensors are unquantised.
    stored = None if in_mxfp4 else content.get_slice(entry.name)
    in_fp8, name_of_scale = stored and stored.get_dtype() == "F8_E4M3", entry.name + fp8.SCALE
    scale = _tensor(path / files[name_of_scale], name_of_scale) if in_fp8 else None

    def part_of(name: str, part: Region) -> torch.Tensor:
        # An index may place blocks and scales in different files, so each is opened by its own name.
        with safe_open(path / files[name], "pt") as file:
            return file.get_slice(name)[part]

    for box, part in parts.items():
        for source, target in entry.overlap(box):
            if stored is None:
                values = mxfp4.dequantised(part_of, entry.name, target)
            elif scale is not None:
                values = fp8.dequantised(stored[target], scale, target)
            else:
                values = stored[target]
            part[source] = entry.inwards(values).to(part)


def check_tensors(
    path: Path,
    files: dict[str, str],
    wanted: list[NamedTensor],
    twice: dict[str, str],
    declared: str | None,
    in_fp8: bool,
    in_mxfp4: bool,
) -> None:
    """Checks names, shapes and dtypes of all tensors, and that tensors stored twice are equal.

    Args:
        path: The directory.
        files: {tensor name: file}.
        wanted: The model's tensors.
        twice: {name of an optional copy: name of its original}.
        declared: Dtype in config.json, if any.
        in_fp8: Whether config.json declares tensors in fp8.
        in_mxfp4: Whether config.json declares experts in 4 bits.

    Raises:
        Unusable: The files do not match the model; names the first tensor.
    """
    # Only headers are read here: whole tensors are read only once everything fits.
    inside = {file: headers(path / file) for file in sorted(set(files.values()))}
    quantised = {name for file in inside.values() for name, (_, dtype) in file.items() if dtype == "F8_E4M3"}
    packed = {entry.name: mxfp4.stored_shapes(entry) for entry in wanted if in_mxfp4 and mxfp4.in_mxfp4(entry)}
    names = {entry.name for entry in wanted} - packed.keys()
    # Quantised tensors are stored under other names, or with a tensor of scales besides.
    names |= {*chain(*packed.values()), *(name + fp8.SCALE for name in quantised if in_fp8)}
    _none("missing", names - files.keys())
    # The index and the files may disagree, so the names of both are checked: first for missing ones, then for unknown
    # ones, then for ones in another file than the index says.
    stored = {name for name in (*files, *chain(*inside.values())) if not name.endswith(COMPUTED)}
    _none("not of this model", stored - names - twice.keys())
    _none(f"not in the file that {INDEX} names", {name for name, file in files.items() if name not in inside[file]})
    for name, expected in chain(*(shapes.items() for shapes in packed.values())):
        _check(name, inside[files[name]][name], expected, "U8")
    unpacked = [entry for entry in wanted if entry.name not in packed]
    _check_unpacked(path, unpacked, {name: inside[file][name] for name, file in files.items()}, declared, in_fp8)
    # Copies of shared tensors are not loaded. If one differed, the directory would be of a model that does not share
    # it, and the configured one would silently compute something else.
    for copy in twice.keys() & files.keys():
        if not torch.equal(*(_tensor(path / files[name], name) for name in (copy, twice[copy]))):
            raise Unusable(f"{copy} differs from {twice[copy]}, with which the configured model shares it")


def _check_unpacked(
    path: Path, wanted: list[NamedTensor], stored: dict[str, Header], declared: str | None, in_fp8: bool
) -> None:
    """Checks shapes and dtypes of the tensors that are not in 4 bits; raises as `check_tensors` does."""
    wider = []
    for entry in wanted:
        shape, dtype = stored[entry.name]
        if tuple(shape) != entry.shape:
            raise Unusable(f"{entry.name} is {tuple(shape)}, and the configured model's is {entry.shape}")
        if in_fp8 and dtype == "F8_E4M3":
            _check(entry.name + fp8.SCALE, stored[entry.name + fp8.SCALE], fp8.scale_shape(entry.shape), "F32")
            continue
        # Without a dtype in config.json the first tensor sets the dtype that all others must have.
        declared = declared or dtype
        if dtype not in (declared, "F32"):
            what = f"{entry.name} is {dtype}, and the other tensors, or {CONFIG}, are {declared}"
            raise Unusable(what, f'write the dtype of the files as "torch_dtype" of {CONFIG}, or {AGAIN}')
        # fp32 beside bf16 is normal for tensors that the model keeps in fp32, such as the router's bias; for others it
        # loses precision on reading, which deserves a warning.
        if dtype != declared and entry.dtype is not torch.float32:
            wider.append(entry.name)
    if wider:
        logger.warning(
            f"{path}: {len(wider)} tensors are stored in fp32, and {CONFIG} says {declared}: they are read, and "
            "rounded to model.dtype"
        )


def _check(name: str, header: Header, shape: tuple[int, ...], dtype: str) -> None:
    there = tuple(header[0]), header[1]
    if there != (shape, dtype):
        raise Unusable(f"{name} is {there[0]} {there[1]}, and must be {shape} {dtype}")


def _none(what: str, names: set[str]) -> None:
    if names:
        raise Unusable(f"{len(names)} tensors are {what}, the first: {min(names)}")


def _tensor(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, "pt") as content:
        return content.get_tensor(name)
