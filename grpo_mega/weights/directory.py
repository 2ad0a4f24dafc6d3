"""Hugging Face model directories: config.json, safetensors and their index, read and written under any layout.

Reading checks all names, shapes, dtypes and the configuration before any weight changes; each rank then reads its own
shards. A directory is written under a temporary name and renamed once it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from grpo_mega.config.schema import ModelConfig
from grpo_mega.errors import InputError
from grpo_mega.models.body import DTYPES as DTYPES_OF_MODELS
from grpo_mega.models.families.config_json import RENAMED, is_mxfp4, said
from grpo_mega.models.model import Model
from grpo_mega.models.policy import Policy
from grpo_mega.models.shards import Box
from grpo_mega.platform.collectives import from_main_rank, succeed_together
from grpo_mega.platform.files import make_new, only_one, sync_folder, write_atomic
from grpo_mega.weights import fp8
from grpo_mega.weights.companions import CONFIG, Companions
from grpo_mega.weights.hf_config import differences, hf_config
from grpo_mega.weights.hf_files import AGAIN, INDEX, Unusable, check_tensors, file_of, fill, headers
from grpo_mega.weights.merging import parts_of
from grpo_mega.weights.names import NamedTensor, copies, entries
from grpo_mega.weights.stream import FILE_BYTES, hf_buckets

ONE_FILE = "model.safetensors"
PREDICTION = "num_nextn_predict_layers"
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Readable dtypes of weights: name in config.json -> name in safetensors."""
NOT_EXPORTED = ("auto_map", "quantization_config", "dtype", "torch_dtype")
"""Fields of an original config.json that describe only its own files (code, precision), so exports drop them."""
EXISTS = "choose a different directory, or remove it"


def is_model(path: Path) -> bool:
    """Whether this is a Hugging Face model directory, complete or not."""
    return (path / CONFIG).is_file()


@torch.no_grad()
def load_weights(path: Path, policy: Model, whole: ModelConfig | None = None) -> None:
    """Reads a model directory into a policy without optimizer, rounding to `model.dtype`; every rank must call it.

    For a model with a scalar head, reads its body and keeps the head; `whole` is then the architecture of the
    directory, a language model with that body.

    Raises:
        InputError: The directory is not of this model, or incomplete; names the first file, tensor or field.
    """
    assert policy.optimizer is None, "an optimizer made before would keep the old master weights"
    model = whole or policy.architecture
    wanted = entries(model, policy.vocab_size)
    # The main rank checks the whole directory and broadcasts the verdict, so that either all ranks raise or none does;
    # otherwise a rank that raised alone would leave the others waiting in the next collective.
    files, problem = from_main_rank(lambda: _examined(path, model, policy.vocab_size, wanted))
    if problem:
        raise InputError(str(path), *problem)
    parts = parts_of(policy, wanted)
    held = {entry.key: parts.held[entry.key] for entry in wanted if entry.key in parts.held}
    mine = defaultdict(list)
    for entry in wanted:
        if entry.key in held:
            mine[file_of(entry, files)].append(entry)
    for of_tensor in held.values():
        for part in of_tensor.values():
            # Rows of the embedding beyond the vocabulary are padding, which no file holds: they stay zero.
            part.zero_()
    # Each file is opened once; safetensors reads only the slices that this rank holds.
    for file, tensors in mine.items():
        with safe_open(path / file, "pt") as content:
            for entry in tensors:
                fill(held[entry.key], entry, content, path, files)


class Reader:
    """Reads shards of Megatron's tensors from a model directory, one at a time."""

    def __init__(self, path: Path, model: ModelConfig, vocab_size: int) -> None:
        """Checks the whole directory; only headers of files are read.

        Raises:
            InputError: The directory is not of this model, or incomplete; names the first file, tensor or field.
        """
        wanted = entries(model, vocab_size)
        self._path = path
        self._files, problem = _examined(path, model, vocab_size, wanted)
        if problem:
            raise InputError(str(path), *problem)
        self._entries: dict[str, list[NamedTensor]] = defaultdict(list)
        for entry in wanted:
            self._entries[entry.key].append(entry)
        self.config = _described(model, vocab_size, _json(path / CONFIG))

    def __contains__(self, key: str) -> bool:
        """Whether the directory has the tensors of this Megatron tensor."""
        return key in self._entries

    def part(self, key: str, box: Box, dtype: torch.dtype) -> torch.Tensor:
        """The part at `box` of the Megatron tensor `key` (`shards.named_box`), rounded to `dtype`."""
        # Zeros rather than uninitialised memory: rows that pad the vocabulary are in no file.
        part = torch.zeros([stop - start for start, stop in box], dtype=dtype)
        for entry in self._entries[key]:
            if any(True for _ in entry.overlap(box)):
                with safe_open(self._path / file_of(entry, self._files), "pt") as content:
                    fill({box: part}, entry, content, self._path, self._files)
        return part


def check_architecture(path: Path, model: ModelConfig, vocab_size: int | None, has_weights: bool = True) -> None:
    """Checks a model directory against a configuration as loading does, but without a policy.

    `vocab_size` is the policy's, or None when only the tokenizer knows. Without weights, as in an imported checkpoint,
    only config.json is checked.

    Raises:
        InputError: The directory is of another model, or cannot be read.
    """
    try:
        _compared(path, _files(path) if has_weights else None, model, vocab_size)
    except Unusable as error:
        raise InputError(str(path), error.what, error.fix) from None


@torch.no_grad()
def save(
    path: Path,
    policy: Policy,
    byte_budget: int = FILE_BYTES,
    beside: Companions | None = None,
    dtype: str | None = None,
) -> None:
    """Writes the policy as a model directory, files of at most `byte_budget` bytes; every rank must call it.

    `beside` has the tokenizer and the end tokens, see `companions.py`; without it only weights and architecture are
    written. The weights are rounded to `dtype`, "fp32" or "bf16", or keep their dtype; balancing biases are always
    fp32. Main memory on every rank: two files.

    Raises:
        InputError: No supported family matches the model, or `path` exists.
        RuntimeError: The disk is full or failed; nothing is left at `path`.
    """
    written = replace(policy.architecture, dtype=dtype or policy.architecture.dtype)
    config = _described(written, policy.vocab_size, beside.origin if beside else {})
    dtypes = {entry.name: entry.dtype for entry in entries(written, policy.vocab_size)}
    if from_main_rank(path.exists):
        raise InputError(str(path), "exists", EXISTS)
    # Parameters of the distributed optimizer may still be waiting for the gather of the next forward pass; reading them
    # before it would export stale shards.
    policy.gather_parameters()
    # All ranks take part in the stream, but only the main rank writes. Every step of the writer ends in
    # `succeed_together`, so that a full disk raises on all ranks instead of leaving them in the next broadcast.
    writer = Writer(path, config, beside) if policy.topology.is_main else None
    try:
        succeed_together(lambda: writer.begin() if writer else None)
        # The budget of the stream counts bytes in the dtype of training; a wider dtype on disk makes each file larger
        # by the growth.
        trained = policy.architecture
        growth = max(1, DTYPES_OF_MODELS[written.dtype].itemsize // DTYPES_OF_MODELS[trained.dtype].itemsize)
        for bucket in hf_buckets(policy, max(1, byte_budget // growth)):
            # Converted in place, one tensor at a time, so that no second copy of the bucket exists.
            for number, (name, tensor) in enumerate(bucket if writer else ()):
                bucket[number] = name, tensor.to(dtypes[name])
            succeed_together(lambda: writer.add(bucket) if writer else None)  # noqa: B023
            # The loop variable refers to this bucket while the generator makes the next one: without this, two would be
            # in memory.
            bucket.clear()
        succeed_together(lambda: writer.finish() if writer else None)
    finally:
        if writer:
            writer.discard()


def _described(model: ModelConfig, vocab_size: int, origin: dict[str, Any]) -> dict[str, Any]:
    """The model's config.json, based on that of the directory it started from if that describes the same function.

    Raises:
        InputError: No supported family matches the model.
    """
    described = hf_config(model, vocab_size)
    # transformers 5 has renamed the field; whichever names the origin uses must state the modules that are really
    # written.
    modules = {key: model.mtp_layers for key in (PREDICTION, RENAMED[PREDICTION]) if key in origin}
    # The origin's file keeps fields that this program does not know. It is used only if it describes the function that
    # is computed now: a changed context or window would otherwise be exported under the old settings.
    if not origin or differences(origin | {PREDICTION: model.mtp_layers}, model, vocab_size):
        return described
    kept = {key: value for key, value in origin.items() if key not in NOT_EXPORTED}
    return kept | modules | {"dtype" if "dtype" in origin else "torch_dtype": described["torch_dtype"]}


class Writer:
    """Model directory written by one process, bucket by bucket; renamed to its final name when it is complete."""

    def __init__(self, path: Path, config: dict[str, Any], beside: Companions | None = None) -> None:
        """`path` must not exist; `config` becomes its config.json, merged with that of `beside`."""
        # The temporary name is fixed, so that the next attempt finds and removes what a killed one left behind.
        self._path, self._temporary = path, path.with_name(f".{path.name}.tmp")
        self._files = beside.files if beside else {}
        self._config = config | (beside.config if beside else {})
        self._names: list[list[str]] = []
        self._bytes = 0
        self._held = ExitStack()

    def begin(self) -> None:
        """Creates the directory under a temporary name, and locks it until `finish` or `discard`.

        Raises:
            InputError: Another process is writing the directory, or has just finished writing it.
        """
        # The parent must exist before the lock is taken, because the lock file lies in it.
        if not self._path.parent.exists():
            self._path.parent.mkdir(parents=True, exist_ok=True)
        self._held.enter_context(only_one(self._path))
        # Checked again under the lock: another process may have finished between the caller's check and this one.
        if self._path.exists():
            raise InputError(str(self._path), "exists", EXISTS)
        # Replaces whatever a killed process left under this name.
        make_new(self._temporary)
        self._held.callback(partial(shutil.rmtree, self._temporary, ignore_errors=True))

    def add(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Writes one more file. Raises an OSError when the disk fails."""
        file = self._part(len(self._names))
        try:
            save_file({name: tensor.cpu() for name, tensor in bucket}, file, {"format": "pt"})
        except SafetensorError as error:
            # Some versions of safetensors report errors of the operating system, such as a full disk, as their own.
            raise OSError(f"{file}: {error}") from error
        # safetensors creates files that only their owner can read; the file gets the folder's permissions instead.
        file.chmod(self._temporary.stat().st_mode & 0o666)
        # The file must be on disk before the directory is renamed: after a power loss a complete name must not lead to
        # empty files.
        with file.open("rb") as written:
            os.fsync(written.fileno())
        self._names.append([name for name, _ in bucket])
        self._bytes += sum(tensor.nbytes for _, tensor in bucket)

    def finish(self) -> None:
        """Gives the files their numbered names, writes the index and companions, and renames the directory."""
        where: dict[str, str] = {}
        for number, inside in enumerate(self._names):
            # The total is part of every name and is known only now, hence the provisional names until here.
            file = f"model-{number + 1:05d}-of-{len(self._names):05d}.safetensors"
            self._part(number).rename(self._temporary / file)
            where |= dict.fromkeys(inside, file)
        index = {"metadata": {"total_size": self._bytes}, "weight_map": where}
        write_atomic(self._temporary / INDEX, json.dumps(index, indent=1))
        for name, content in self._files.items():
            write_atomic(self._temporary / name, content)
        write_atomic(self._temporary / CONFIG, json.dumps(self._config, indent=1))
        # The rename publishes everything at once, and syncing the parent makes it survive a power loss. Closing then
        # runs the removal of the temporary folder, which no longer exists.
        self._temporary.rename(self._path)
        sync_folder(self._path.parent)
        self._held.close()

    def discard(self) -> None:
        """Removes this writer's directory if it is unfinished; does nothing after `finish`."""
        self._held.close()

    def _part(self, number: int) -> Path:
        return self._temporary / f"part-{number}"


def _examined(
    path: Path, model: ModelConfig, vocab_size: int, wanted: list[NamedTensor]
) -> tuple[dict[str, str], tuple[str, str] | None]:
    """{tensor name: file}, and (what is wrong with the directory, how to fix it) or None if it can be loaded."""
    try:
        files = _files(path)
        config = _compared(path, files, model, vocab_size)
        in_fp8 = fp8.is_fp8(config.get("quantization_config"))
        # transformers 5 writes `dtype`, earlier releases `torch_dtype`.
        name = config.get("dtype") or config.get("torch_dtype")
        if name is not None and name not in DTYPES:
            raise Unusable(f"{CONFIG}: weights in {name} cannot be read", f"convert them to one of {', '.join(DTYPES)}")
        declared = DTYPES[name] if name else None
        check_tensors(path, files, wanted, copies(model), declared, in_fp8, is_mxfp4(config))
        return files, None
    except Unusable as error:
        return {}, (error.what, error.fix)
    except Exception as error:
        # Whatever a malformed file raises must become an answer: the other ranks are waiting for it in a broadcast.
        return {}, (f"{type(error).__name__}: {error}", AGAIN)


def _compared(path: Path, files: dict[str, str] | None, model: ModelConfig, vocab_size: int | None) -> dict[str, Any]:
    """Reads the directory's config.json and checks that it describes this model.

    Raises:
        Unusable: It describes another model, or the files have other prediction modules.
    """
    config = _json(path / CONFIG)
    # The number of prediction modules is checked below, against the files, which decide it.
    apart = {} if files is None else {PREDICTION: model.mtp_layers}
    if unlike := differences(config | apart, model, vocab_size or config.get("vocab_size", 0)):
        what = f"{CONFIG} is of another model than the configuration: {'; '.join(unlike)}"
        raise Unusable(what, "choose the folder of the configured model, or model=from_folder")
    if files is not None:
        _check_prediction_modules(config, files, model)
    return config


def _check_prediction_modules(config: dict[str, Any], files: dict[str, str], model: ModelConfig) -> None:
    """Raises `Unusable` when a directory has other multi-token prediction modules than the configuration.

    Its tensors decide: for DeepSeek-V3, transformers names one module in config.json and writes none.
    """
    named = said(config, PREDICTION) or 0
    layers = range(model.layers, model.layers + named)
    there = sum(any(name.startswith(f"model.layers.{layer}.") for name in files) for layer in layers)
    if model.mtp_layers > there:
        raise Unusable(
            f"model.mtp_layers={model.mtp_layers}, and the files do not hold that many prediction modules ({CONFIG} "
            f"names {named}, the files hold {there})",
            f"set model.mtp_layers={there}",
        )
    if model.mtp_layers < there:
        raise Unusable(
            f"the files hold {there} prediction modules ({PREDICTION}), and model.mtp_layers={model.mtp_layers}",
            f"set model.mtp_layers={there}",
        )


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise Unusable(f"{file.name} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise Unusable(f"{file.name} is not a JSON object")
    return content


def _files(path: Path) -> dict[str, str]:
    """{tensor name: file}, from the index or, without one, from the single file."""
    if (path / INDEX).is_file():
        where = _json(path / INDEX).get("weight_map")
        if not isinstance(where, dict):
            raise Unusable(f"{INDEX} has no weight_map")
        # The index comes from outside: a name such as ../x would read files elsewhere, and opening a pipe would block
        # forever.
        for file in {*map(str, where.values())}:
            if Path(file).name != file or ((path / file).exists() and not (path / file).is_file()):
                raise Unusable(f"{INDEX} names {file}, which is not a file of the folder")
        return where
    if not (path / ONE_FILE).is_file():
        raise Unusable(f"it has neither {ONE_FILE} nor {INDEX}, and only safetensors are read")
    return dict.fromkeys(headers(path / ONE_FILE), ONE_FILE)
