"""Adapters in the format of the library `peft`: the names of its tensors, and adapter_config.json.

`peft` loads them over the model that training started from: transformers' class with the weights of `run.init_from`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from grpo_mega.config.schema import LoRAConfig
from grpo_mega.errors import InputError
from grpo_mega.models.adapters import A, B, target_of
from grpo_mega.weights.names import NamedTensor, Rows

PREFIX = "base_model.model."
"""Prefix of all tensor names, as transformers' model is nested in the library's."""
MERGED = "leave --adapter out: the weights are then written with all adapters in them (another run may have"


def adapter_entries(model: list[NamedTensor], lora: LoRAConfig, layers: int) -> list[NamedTensor]:
    """Adapters of a model's tensors, in order: for each matrix lora_A [rank, inputs] and lora_B [outputs, rank].

    Adapters of prediction modules (beyond `layers` layers), which transformers does not build, are left out.
    """
    return [*_adapters([entry for entry in model if _layer(entry) < layers], lora)]


def _adapters(model: list[NamedTensor], lora: LoRAConfig) -> Iterator[NamedTensor]:
    fused = defaultdict(list)
    for entry in model:
        fused[entry.key].append(entry.rows.start)
    for entry in model:
        if not _is_adapted(entry, lora):
            continue
        starts, layer, name = sorted(fused[entry.key]), entry.key.removesuffix(".weight"), _matrix(entry)
        first, (outputs, inputs) = starts.index(entry.rows.start) * lora.rank, entry.shape
        # Megatron stacks the A matrices of a fused layer, so `lora_A` of one part is a range of rows; `lora_B` has the
        # rows of its weight.
        rows = Rows(len(starts) * lora.rank, first, first + lora.rank)
        a, b = (f"{PREFIX}{name}.lora_{letter}.weight" for letter in "AB")
        yield entry._replace(name=a, key=layer + A, shape=(lora.rank, inputs), rows=rows, joins_last=False)
        yield entry._replace(name=b, key=layer + B, shape=(outputs, lora.rank), joins_last=False)


def adapter_config(model: list[NamedTensor], lora: LoRAConfig, base: str | None, layers: int) -> dict[str, Any]:
    """Content of adapter_config.json; `base` is the folder or name of the model that the adapters belong to.

    Raises:
        InputError: `peft` would lose some adapters: transformers 5 has all experts of a layer in one tensor, and `peft`
            then takes every adapter of a gate_proj for an expert's (_convert_peft_config_moe, 0.21). Or it lacks such
            adapters: GPT-OSS also stores all experts in one tensor.
    """
    stacked = next((entry.name for entry in model if entry.place and _is_adapted(entry, lora)), None)
    if stacked:
        raise InputError(stacked, "peft has no adapters of single experts", f"{MERGED} lora.targets=[attention])")
    matrices = [entry for entry in model if len(entry.shape) == 2 and _layer(entry) < layers]
    adapted = {_matrix(entry) for entry in matrices if _is_adapted(entry, lora)}
    beside = next((name for name in adapted if ".mlp." in name and ".experts." not in name), None)
    if beside and any(entry.expert is not None for entry in model):
        what = "peft cannot load its adapter beside routed experts"
        raise InputError(beside, what, f"{MERGED} lora.targets=[attention,experts])")
    # `peft` matches a short name in every layer. Short names are used only if they select exactly the adapted matrices;
    # otherwise full names are listed.
    last = {name.rpartition(".")[2] for name in adapted}
    meant = {_matrix(entry) for entry in matrices if _matrix(entry).rpartition(".")[2] in last}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(last if meant == adapted else adapted),
    }


def _is_adapted(entry: NamedTensor, lora: LoRAConfig) -> bool:
    return entry.key.endswith(".weight") and target_of(entry.key.removesuffix(".weight")) in lora.targets


def _matrix(entry: NamedTensor) -> str:
    """Name of a tensor's module."""
    return entry.name.removesuffix(".weight")


def _layer(entry: NamedTensor) -> int:
    """Layer of a tensor; 0 for a tensor outside the layers."""
    match = re.match(r"model\.layers\.(\d+)\.", entry.name)
    return int(match[1]) if match else 0
