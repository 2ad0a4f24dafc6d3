"""The parts of a model, by its parameters' names: which of them are trained, and how the optimizer treats each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.optimizer import ParamKey, ParamWithNamePredicate

from grpo_mega.config.schema import LoRAConfig, PartConfig, PartsConfig


def part_of(name: str, tied: bool) -> str:
    """The part, a field of `PartsConfig`, that a parameter belongs to, by its name in the model or in what wraps it.

    With `tied` embeddings the output layer is the embedding, also on a pipeline stage that has a copy of it.
    """
    words = name.split(".")
    if "adapter" in words:
        return "adapters"
    if "mtp" in words:
        return "predictors"
    if any("norm" in word for word in words):
        return "norms"
    if "output_layer" in words or "scalar_head" in words:
        return "embedding" if tied else "head"
    for word, part in _PARTS.items():
        if word in words:
            return part
    raise ValueError(f"the parameter {name} belongs to no part of the model that optimizer.parts has")


_PARTS = {
    "embedding": "embedding",
    "router": "router",
    "experts": "experts",
    "self_attention": "attention",
    "mlp": "mlp",
}
"""A module in a parameter's name -> its part; of several the first, for routers and experts are within an MLP."""


def frozen_parts(frozen: Sequence[str], lora: LoRAConfig | None) -> set[str]:
    """The parts that are not trained: those that are named, or with adapters everything else."""
    if lora is None:
        return {*frozen}
    return {field.name for field in fields(PartsConfig)} - {"adapters"}


def freeze(module: torch.nn.Module, is_frozen: Callable[[str], bool]) -> None:
    """Parameters of these names are not trained from here on: what is trained is decided here.

    Call it before Megatron's DistributedDataParallel and optimizer, which have gradients and moments for parameters
    that require a gradient, and count no others in the gradient norm.
    """
    for name, parameter in module.named_parameters():
        if is_frozen(name):
            parameter.requires_grad_(False)
    for embedding in (each for each in module.modules() if isinstance(each, LanguageModelEmbedding)):
        if not embedding.word_embeddings.weight.requires_grad:
            embedding.register_forward_hook(_begin_gradients)


def _begin_gradients(_: torch.nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
    """Has gradients from the embedding on: what recomputes layers, or waits for a gradient from a stage, needs one."""
    return output.requires_grad_() if torch.is_grad_enabled() and output.is_leaf else output


def settings_of(parts: PartsConfig) -> dict[str, PartConfig]:
    """{part: its settings}"""
    return {
        "embedding": parts.embedding,
        "head": parts.head,
        "attention": parts.attention,
        "mlp": parts.mlp,
        "experts": parts.experts,
        "router": parts.router,
        "norms": parts.norms,
        "predictors": parts.predictors,
        "adapters": parts.adapters,
    }


def group_overrides(parts: PartsConfig, tied: bool) -> dict[ParamKey, dict[str, float]]:
    """What Megatron's parameter groups have for parameters of their own: see `get_megatron_optimizer`.

    A group is known by "lr_mult" and "wd_mult" in a checkpoint, so these tell all groups apart: a decay of its own is
    the "wd_mult" of a "weight_decay" of 1, and none at all is the "wd_mult" of 0 that norms and biases have.
    """
    overrides: dict[ParamKey, dict[str, float]] = {_key("spared", _is_spared): {"wd_mult": 0.0}}
    for part, own in settings_of(parts).items():
        if own.lr_multiplier != 1:
            overrides[_key(f"rate of {part}", _within(part, tied, spared=True))] = {"lr_mult": own.lr_multiplier}
        if own.weight_decay is not None:
            decay = {"wd_mult": own.weight_decay} | ({"weight_decay": 1.0} if own.weight_decay else {})
            overrides[_key(f"decay of {part}", _within(part, tied, spared=False))] = decay
    return overrides


def _key(name: str, chosen: Callable[[torch.nn.Parameter, str], bool]) -> ParamKey:
    return ParamKey(with_name_predicate=ParamWithNamePredicate(name, chosen))


def _is_spared(parameter: torch.nn.Parameter, name: str) -> bool:
    """Norms, biases and sinks, which never decay."""
    return parameter.dim() == 1 or name.endswith(".bias")


def _within(part: str, tied: bool, spared: bool) -> Callable[[torch.nn.Parameter, str], bool]:
    """Whether a parameter is of this part, `spared` ones included or not."""
    return lambda parameter, name: part_of(name, tied) == part and (spared or not _is_spared(parameter, name))
