"""Exports a policy as a Hugging Face folder (weights, tokenizer, model card), or its adapters."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from grpo_mega.checkpoint.checkpoint import STATE
from grpo_mega.config.schema import Config
from grpo_mega.convert.card import Facts, card
from grpo_mega.data.model_defaults import stop_ids
from grpo_mega.data.tokenizer import Tokenizer
from grpo_mega.errors import InputError
from grpo_mega.models.policy import Policy
from grpo_mega.platform.collectives import succeed_together
from grpo_mega.platform.files import make_new, only_one, sync_folder, write_atomic
from grpo_mega.weights import directory
from grpo_mega.weights.companions import Companions, companions
from grpo_mega.weights.names import entries
from grpo_mega.weights.peft import adapter_config
from grpo_mega.weights.stream import hf_buckets

CARD = "README.md"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
BUCKET_BYTES = 2**30


def write_folder(path: Path, policy: Policy, config: Config, tokenizer: Tokenizer, facts: Facts) -> None:
    """Writes the policy to `path`, in the dtype of the `facts`; every rank must call it. See `directory.save`.

    Raises:
        InputError: No supported family matches the model, or `path` exists.
        RuntimeError: The disk is full or failed; nothing is left at `path`.
    """
    beside: Companions | None = None

    def read_companions() -> None:
        nonlocal beside
        folders = (config.data.tokenizer, config.run.init_from)
        files = companions(*folders, config.model, stop_ids(config.rollout.stop, tokenizer, folders))
        beside = replace(files, files=files.files | {CARD: card(config, facts).encode()})

    # Only the main rank needs these files, and it may fail to read them: then no rank goes on to write.
    succeed_together(read_companions if policy.topology.is_main else lambda: None)
    directory.save(path, policy, beside=beside, dtype=facts.dtype)


def write_adapter(path: Path, policy: Policy, origin: str | None) -> None:
    """Writes the adapters of a policy for the library `peft`; every rank must call it. `origin` is `run.init_from`.

    The folder holds adapter_config.json and adapter_model.safetensors. Main memory: a bucket on every rank, all
    adapters on the main rank.

    Raises:
        InputError: No supported family matches the model.
        RuntimeError: The disk is full or failed; nothing is left at `path`.
    """
    assert policy.lora, "a policy without adapters"
    model = entries(policy.architecture, policy.vocab_size)
    settings = adapter_config(model, policy.lora, base_of_adapters(origin), policy.architecture.layers)
    is_main, tensors = policy.topology.is_main, {}
    for bucket in hf_buckets(policy, BUCKET_BYTES, adapters=True):
        tensors.update({name: tensor.cpu() for name, tensor in bucket} if is_main else {})
        # Dropped before the generator makes the next one, so that only one bucket is on the device.
        del bucket
    succeed_together(lambda: _write_adapter(path, tensors, settings) if is_main else None)


def base_of_adapters(origin: str | None) -> str | None:
    """Folder of the base model for `peft`: that of an imported checkpoint; None for other checkpoints."""
    # `peft` needs a folder that transformers can load. An imported checkpoint is none, but records the folder that it
    # was made from.
    state = Path(origin or "") / STATE
    return json.loads(state.read_text()).get("imported_from") if origin and state.is_file() else origin


def _write_adapter(path: Path, tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
    """Writes both files under a temporary name, then renames the folder."""
    temporary = path.with_name(f".{path.name}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    with only_one(path):
        # Checked under the lock, as another process may just have finished it.
        if path.exists():
            raise InputError(str(path), "exists", directory.EXISTS)
        make_new(temporary)
        try:
            file = temporary / ADAPTER
            save_file(tensors, file, {"format": "pt"})
            # safetensors creates files that only their owner can read; the file gets the folder's permissions instead.
            file.chmod(temporary.stat().st_mode & 0o666)
            # The weights must be on disk before the rename: after a power loss a complete folder must not hold an empty
            # file.
            with file.open("rb") as written:
                os.fsync(written.fileno())
            write_atomic(temporary / ADAPTER_CONFIG, json.dumps(settings, indent=1))
            temporary.rename(path)
            sync_folder(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
