"""Parts of a model, by the names of its parameters: which are trained, and with which optimizer settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.optimizer import ParamKey, ParamWithNamePredicate

from grpo_mega.config.schema import LoRAConfig, PartConfig, PartsConfig


def part_of(name: str, tied: bool) -> str:
    """Part (a field of `PartsConfig`) of a parameter, by its name in the model or in a wrapper.

    With `tied` embeddings the output layer is the embedding, also on a pipeline stage that has a copy of it.
    """
    words = name.split(".")
    if "adapter" in words:
        return "adapters"
    # The order matters: a prediction module contains attention and an MLP, and norms occur in all of them.
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
"""Module in a parameter's name -> part; the first match counts, as routers and experts are within an MLP."""


def frozen_parts(frozen: Sequence[str], lora: LoRAConfig | None) -> set[str]:
    """Parts that are not trained: the named ones, or with adapters everything else."""
    if lora is None:
        return {*frozen}
    return {field.name for field in fields(PartsConfig)} - {"adapters"}


def freeze(module: torch.nn.Module, is_frozen: Callable[[str], bool]) -> None:
    """Freezes the parameters of these names; the only place that decides what is trained.

    Call it before Megatron's DistributedDataParallel and optimizer, which create gradients and moments only for
    parameters that require a gradient, and count only those in the norm.
    """
    for name, parameter in module.named_parameters():
        if is_frozen(name):
            parameter.requires_grad_(False)
    for embedding in (each for each in module.modules() if isinstance(each, LanguageModelEmbedding)):
        if not embedding.word_embeddings.weight.requires_grad:
            embedding.register_forward_hook(_begin_gradients)


def _begin_gradients(_: torch.nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
    """Makes gradients start at the output of a frozen embedding.

    Recomputed layers, and pipeline stages that wait for a gradient, need one there.
    """
    return output.requires_grad_() if torch.is_grad_enabled() and output.is_leaf else output


def settings_of(parts: PartsConfig) -> dict[str, PartConfig]:
    """{part: its settings}."""
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
    """Overrides of Megatron's parameter groups by part; see `get_megatron_optimizer`.

    A checkpoint identifies a group by "lr_mult" and "wd_mult", so these must differ between groups: a part's own decay
    is the "wd_mult" of a "weight_decay" of 1, and no decay the "wd_mult" of 0, as for norms and biases.
    """
    overrides: dict[ParamKey, dict[str, float]] = {_key("spared", _is_spared): {"wd_mult": 0.0}}
    for part, own in settings_of(parts).items():
        if own.lr_multiplier != 1:
            # Of all parameters of the part: its biases are spared from decay, not from its learning rate.
            overrides[_key(f"rate of {part}", _within(part, tied, spared=True))] = {"lr_mult": own.lr_multiplier}
        if own.weight_decay is not None:
            decay = {"wd_mult": own.weight_decay} | ({"weight_decay": 1.0} if own.weight_decay else {})
            overrides[_key(f"decay of {part}", _within(part, tied, spared=False))] = decay
    return overrides


def _key(name: str, chosen: Callable[[torch.nn.Parameter, str], bool]) -> ParamKey:
    return ParamKey(with_name_predicate=ParamWithNamePredicate(name, chosen))


def _is_spared(parameter: torch.nn.Parameter, name: str) -> bool:
    """Whether a parameter never decays: norms, biases and sinks."""
    return parameter.dim() == 1 or name.endswith(".bias")


def _within(part: str, tied: bool, spared: bool) -> Callable[[torch.nn.Parameter, str], bool]:
    """Predicate for the parameters of a part, either `spared` ones or the others."""
    return lambda parameter, name: part_of(name, tied) == part and (spared or not _is_spared(parameter, name))
