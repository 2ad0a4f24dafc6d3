"""Hugging Face model directories: config.json, safetensors and their index, read and written under any layout.

Reading checks all names, shapes, dtypes and the configuration before a weight changes; each rank then reads the parts
that it holds. A directory is written under a temporary name and renamed when it is whole.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors_bytes

from grpo_mega.config.schema import ModelConfig
from grpo_mega.models.policy import Policy
from grpo_mega.platform.collectives import if_all_can, main_says
from grpo_mega.platform.files import sync_folder, write_atomic
from grpo_mega.weights import fp8
from grpo_mega.weights.companions import CONFIG, Companions
from grpo_mega.weights.families import RENAMED, differences, hf_config
from grpo_mega.weights.names import Entry, copies, entries
from grpo_mega.weights.stream import held_parts, hf_buckets

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
PREDICTION = "num_nextn_predict_layers"
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Of weights that can be read: as config.json calls them, and as safetensors does."""


class _Unusable(Exception):
    """Why a directory cannot be read."""


def is_model(path: Path) -> bool:
    """Whether this is a Hugging Face model directory, whole or not."""
    return (path / CONFIG).is_file()


@torch.no_grad()
def load_weights(path: Path, policy: Policy) -> None:
    """Reads a model directory into a policy without optimizer, rounding to `model.dtype`; every rank must call it.

    Raises:
        ValueError: The directory is not of this model, or not whole; names the first file, tensor or field.
    """
    assert policy.optimizer is None, "an optimizer made before would keep the old master weights"
    found = entries(policy.architecture, policy.vocab_size)
    files, problem = main_says(lambda: _examined(path, policy, found))
    if problem:
        raise ValueError(f"{path} cannot be loaded: {problem}")
    held = held_parts(policy, found)
    mine = defaultdict(list)
    for entry in found:
        if entry.key in held:
            mine[files[entry.name]].append(entry)
    for parts in held.values():
        for part in parts.values():
            part.zero_()  # rows of the embedding behind the vocabulary stay so
    for file, tensors in mine.items():
        with safe_open(path / file, "pt") as content:
            for entry in tensors:
                stored = content.get_slice(entry.name)
                scale = _scale(path, files, entry.name) if stored.get_dtype() == "F8_E4M3" else None
                for box, part in held[entry.key].items():
                    for source, target in entry.overlap(box):
                        values = stored[target]
                        if scale is not None:
                            values = fp8.dequantised(values, scale, target)
                        part[source] = values.to(part)


def check_architecture(path: Path, model: ModelConfig, vocab_size: int | None) -> None:
    """Compares a model directory with a configuration as loading it does, before there is a policy.

    `vocab_size` is what the policy will have, or None when only the tokenizer knows.

    Raises:
        ValueError: It is of another model, or cannot be read.
    """
    try:
        _compared(path, _files(path), model, vocab_size)
    except _Unusable as error:
        raise ValueError(f"{path} cannot be loaded: {error}") from None


def save(path: Path, policy: Policy, byte_budget: int = 4 * 2**30, beside: Companions | None = None) -> None:
    """Writes the policy as a model directory, files of at most `byte_budget` bytes; every rank must call it.

    `beside` the weights lie a tokenizer and the tokens that end a text, see `companions.py`; without them only weights
    and architecture. Main memory on the first rank: two files.

    Raises:
        ValueError: No supported family describes the model, or `path` exists.
        RuntimeError: The disk is full or failed; nothing is left at `path`.
    """
    config = hf_config(policy.architecture, policy.vocab_size)
    if main_says(path.exists):
        raise ValueError(f"{path} exists; name another directory, or remove it")
    writer = Writer(path, config, beside) if policy.topology.is_main else None
    try:
        if_all_can(lambda: writer.begin() if writer else None)
        for bucket in hf_buckets(policy, byte_budget):
            if_all_can(lambda: writer.add(bucket) if writer else None)  # noqa: B023
        if_all_can(lambda: writer.finish() if writer else None)
    finally:
        if writer:
            writer.discard()


class Writer:
    """A model directory that one process writes, bucket by bucket; it has its name when it is whole."""

    def __init__(self, path: Path, config: dict[str, Any], beside: Companions | None = None) -> None:
        """`path` must not exist; `config` becomes its config.json, with what comes `beside` the weights."""
        self._path, self._temporary = path, path.with_name(f".{path.name}.tmp")
        self._files = beside.files if beside else {}
        self._config = config | (beside.config if beside else {})
        self._names: list[list[str]] = []
        self._bytes = 0

    def begin(self) -> None:
        """Makes the directory, under a temporary name."""
        self.discard()
        self._temporary.mkdir(parents=True)

    def add(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """One more file; main memory: it twice."""
        content = safetensors_bytes({name: tensor.cpu() for name, tensor in bucket}, {"format": "pt"})
        write_atomic(self._part(len(self._names)), content)
        self._names.append([name for name, _ in bucket])
        self._bytes += sum(tensor.nbytes for _, tensor in bucket)

    def finish(self) -> None:
        """Gives the files, which are counted now, their names, writes what describes them, renames the directory."""
        where: dict[str, str] = {}
        for number, inside in enumerate(self._names):
            file = f"model-{number + 1:05d}-of-{len(self._names):05d}.safetensors"
            self._part(number).rename(self._temporary / file)
            where |= dict.fromkeys(inside, file)
        index = {"metadata": {"total_size": self._bytes}, "weight_map": where}
        write_atomic(self._temporary / INDEX, json.dumps(index, indent=1))
        for name, content in self._files.items():
            write_atomic(self._temporary / name, content)
        write_atomic(self._temporary / CONFIG, json.dumps(self._config, indent=1))
        self._temporary.rename(self._path)
        sync_folder(self._path.parent)

    def discard(self) -> None:
        """Removes what is not whole."""
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _part(self, number: int) -> Path:
        return self._temporary / f"part-{number}"


def _examined(path: Path, policy: Policy, found: list[Entry]) -> tuple[dict[str, str], str | None]:
    """{name of a tensor: its file}, or what is wrong with the directory."""
    try:
        files = _files(path)
        config = _compared(path, files, policy.architecture, policy.vocab_size)
        quantised = fp8.is_fp8(config.get("quantization_config"))
        _check_tensors(path, files, found, copies(policy.architecture), _declared(config), quantised)
        return files, None
    except _Unusable as error:
        return {}, str(error)
    except Exception as error:  # whatever is wrong with a file, the other ranks must hear of it
        return {}, f"{type(error).__name__}: {error}"


def _compared(path: Path, files: dict[str, str], model: ModelConfig, vocab_size: int | None) -> dict[str, Any]:
    """The directory's config.json, which is of this model.

    Raises:
        _Unusable: It is not, or the files hold other prediction modules.
    """
    config = _json(path / CONFIG)
    found = config | {PREDICTION: model.mtp_layers}  # of which the files say more
    if unlike := differences(found, model, vocab_size or config.get("vocab_size", 0)):
        raise _Unusable(f"{CONFIG} is of another model than the configuration: {'; '.join(unlike)}")
    _check_prediction_modules(config, files, model)
    return config


def _check_prediction_modules(config: dict[str, Any], files: dict[str, str], model: ModelConfig) -> None:
    """Raises `_Unusable` when a directory has other multi-token prediction modules than the configuration.

    Its tensors count: of DeepSeek-V3, transformers names one module in config.json and writes none.
    """
    named = config.get(PREDICTION, config.get(RENAMED[PREDICTION])) or 0
    layers = range(model.layers, model.layers + named)
    there = sum(any(name.startswith(f"model.layers.{layer}.") for name in files) for layer in layers)
    if model.mtp_layers > there:
        raise _Unusable(
            f"model.mtp_layers={model.mtp_layers}, and no tensors of so many prediction modules are there ({CONFIG} "
            f"names {named}, the files hold {there}); set model.mtp_layers={there}"
        )
    if model.mtp_layers < there:
        raise _Unusable(
            f"the files hold {there} prediction modules ({PREDICTION}), and model.mtp_layers={model.mtp_layers}; set "
            f"model.mtp_layers={there}"
        )


def _declared(config: dict[str, Any]) -> str | None:
    """The dtype that config.json gives, in safetensors' words; None when it gives none.

    Raises:
        _Unusable: Weights of this dtype cannot be read.
    """
    name = config.get("dtype") or config.get("torch_dtype")  # transformers 5; before
    if name is not None and name not in DTYPES:
        raise _Unusable(f"{CONFIG}: weights in {name} cannot be read; convert them to one of {', '.join(DTYPES)}")
    return DTYPES[name] if name else None


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise _Unusable(f"{file.name} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise _Unusable(f"{file.name} holds no JSON object")
    return found


def _files(path: Path) -> dict[str, str]:
    """{name of a tensor: its file} as the index has it, or as the only file has it."""
    if (path / INDEX).is_file():
        where = _json(path / INDEX).get("weight_map")
        if not isinstance(where, dict):
            raise _Unusable(f"{INDEX} holds no weight_map")
        return where
    return dict.fromkeys(_headers(path / ONE_FILE), ONE_FILE)


def _headers(file: Path) -> dict[str, tuple[list[int], str]]:
    """{name: (shape, dtype)} of the tensors in a file."""
    try:
        with safe_open(file, "pt") as content:
            slices = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118
            return {name: (s.get_shape(), s.get_dtype()) for name, s in slices.items()}
    except (SafetensorError, OSError) as error:
        raise _Unusable(f"{file.name}: {error}") from error


def _check_tensors(
    path: Path,
    files: dict[str, str],
    found: list[Entry],
    twice: dict[str, str],
    declared: str | None,
    quantised: bool,
) -> None:
    """Names, shapes and dtypes of all tensors, and that what is stored twice is twice the same."""
    inside = {file: _headers(path / file) for file in sorted(set(files.values()))}
    in_fp8 = {name for of_file in inside.values() for name, (_, dtype) in of_file.items() if dtype == "F8_E4M3"}
    scales = {name + fp8.SCALE for name in in_fp8} if quantised else set()
    wanted = {*scales, *(entry.name for entry in found)}
    _none("missing", wanted - files.keys())
    _none("not of this model", {*files, *chain(*inside.values())} - wanted - twice.keys())
    _none(f"not in the file that {INDEX} names", {name for name, file in files.items() if name not in inside[file]})
    for entry in found:
        shape, dtype = inside[files[entry.name]][entry.name]
        if tuple(shape) != entry.shape:
            raise _Unusable(f"{entry.name} is {tuple(shape)}, and the configured model's is {entry.shape}")
        if quantised and entry.name in in_fp8:
            _check_scale(entry, *inside[files[entry.name + fp8.SCALE]][entry.name + fp8.SCALE])
            continue
        declared = declared or dtype
        if dtype != declared and not (entry.dtype is torch.float32 and dtype == "F32"):
            raise _Unusable(f"{entry.name} is {dtype}, and the others, or {CONFIG}, say {declared}")
    for copy in twice.keys() & files.keys():
        if not torch.equal(*(_tensor(path / files[name], name) for name in (copy, twice[copy]))):
            raise _Unusable(f"{copy} differs from {twice[copy]}, with which the configured model shares it")


def _check_scale(entry: Entry, shape: list[int], dtype: str) -> None:
    expected = fp8.scale_shape(entry.shape)
    if (tuple(shape), dtype) != (expected, "F32"):
        raise _Unusable(f"{entry.name}{fp8.SCALE} is {tuple(shape)} {dtype}, and must be {expected} F32")


def _none(what: str, names: set[str]) -> None:
    if names:
        raise _Unusable(f"{len(names)} tensors are {what}, the first: {min(names)}")


def _scale(path: Path, files: dict[str, str], name: str) -> torch.Tensor:
    return _tensor(path / files[name + fp8.SCALE], name + fp8.SCALE)


def _tensor(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, "pt") as content:
        return content.get_tensor(name)
