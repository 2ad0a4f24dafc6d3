"""The config.json of a model, for the Hugging Face family that computes the same function."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any

from grpo_mega.config.schema import Llama3RopeConfig, MLAConfig, ModelConfig, MoEConfig, YarnConfig
from grpo_mega.errors import InputError
from grpo_mega.models.body import has_balancing_bias, head_channels
from grpo_mega.models.families import FAMILIES, Family
from grpo_mega.models.families.config_json import (
    ROPE,
    YARN_ASSUMED,
    family_in,
    is_mxfp4,
    layer_types,
    rope,
    rope_fields,
    said,
    windows,
)
from grpo_mega.weights.fp8 import is_fp8


def family_of(model: ModelConfig) -> Family:
    """The first family that computes the same function.

    Raises:
        InputError: No family does; names the closest, and the fields that it cannot express.
    """
    obstacles = {name: [*_obstacles(model, family)] for name, family in FAMILIES.items()}
    if fitting := [name for name, found in obstacles.items() if not found]:
        return FAMILIES[fitting[0]]

    # Only the error below needs the closest family: one of the same kind of model comes first, then the one with the
    # fewest obstacles.
    def distance(family: Family) -> tuple[bool, bool, bool, int]:
        return (
            family.always.get("family") != model.family,
            family.always.get("attention", "gqa") != model.attention,
            family.has_experts != bool(model.moe.experts),
            len(obstacles[family.name]),
        )

    closest = min(FAMILIES.values(), key=distance)
    what = (
        f"{closest.architecture}, the closest Hugging Face model, cannot express {'; '.join(obstacles[closest.name])}"
    )
    raise InputError("model", what, "set these as their brackets say")


ModelSection = ModelConfig | MoEConfig | MLAConfig | YarnConfig | Llama3RopeConfig
_OF_ALL = {
    "rope_base", "init_std", "dtype",  # every config.json states them
    "vocab_multiple", "mtp_loss_coef", "moe.aux_loss_coef", "moe.z_loss_coef",  # they matter to training alone
    "moe.score", "moe.bias_update_rate", "moe.frozen_bias",  # `_obstacles_in_experts` compares them together
}  # fmt: skip
"""Settings that any family can have with any value."""
_BY_ATTRIBUTE = {
    "layer_types": {"full_every"},
    "inner_rope": {"window_rope_base"},
    "partly_rotary": {"rope_fraction"},
    "balanced": {"moe.shared_ffn_hidden", "moe.groups", "moe.group_top_k"},
}  # fmt: skip
"""Attribute of a `Family` -> settings that its config.json states, in other words than those of `Family.fields`."""


def _obstacles(model: ModelConfig, family: Family) -> Iterator[str]:
    """Yields the settings whose values the family cannot express, with the values that it can.

    A setting that the family does not mention must have the value that the family implies, so that none is lost.
    """
    stated = {*family.fields.values(), *family.also, *_OF_ALL}
    stated |= {name for flag, names in _BY_ATTRIBUTE.items() if getattr(family, flag) for name in names}
    yield from _unstated(model, family.always, stated)
    if model.window is None and family.window == "must":
        yield "model.window=null (set it)"
    if bool(model.moe.experts) != family.has_experts:
        yield f"model.moe.experts={model.moe.experts} (set {'0' if model.moe.experts else 'above 0'})"
    elif family.has_experts:
        yield from _unstated(model.moe, {}, stated, "moe.")
        yield from _obstacles_in_experts(model.moe, family)
    # A model with another kind of attention is told so, and its ranks do not matter.
    if model.attention == "mla" == family.always.get("attention"):
        yield from _unstated(model.mla, {}, stated, "mla.")
    for kind, (section, _) in ROPE.items():
        settings = getattr(model, section)
        if settings.factor > 1 and kind not in family.rope:
            yield f"model.{section}.factor={settings.factor} (set 1)"
        elif settings.factor > 1:
            written = {f"{section}.{field}" for field in rope_fields(kind, family).values()}
            yield from _unstated(settings, {}, written, f"{section}.")
    yield from family.obstacles(model)


def _unstated(settings: ModelSection, implied: Mapping[str, Any], stated: set[str], section: str = "") -> Iterator[str]:
    """Yields the settings of a dataclass, but for nested ones, that are neither stated nor as the family implies."""
    for field in fields(settings):
        value, wanted = getattr(settings, field.name), implied.get(field.name, field.default)
        if value != wanted and not is_dataclass(value) and f"{section}{field.name}" not in stated:
            yield f"model.{section}{field.name}={_word(value)} (set {_word(wanted)})"


def _obstacles_in_experts(moe: MoEConfig, family: Family) -> Iterator[str]:
    if not family.balanced:
        if moe.score != "softmax" or has_balancing_bias(moe):
            yield f"model.moe.score={moe.score} (set softmax, and model.moe.bias_update_rate=0)"
        return
    if moe.score != "sigmoid":
        yield f"model.moe.score={moe.score} (set sigmoid)"
    elif not has_balancing_bias(moe):
        yield (
            f"model.moe.score={moe.score} with model.moe.bias_update_rate=0 (its router has a bias: set above 0, or "
            "model.moe.frozen_bias=true)"
        )
    if not moe.shared_ffn_hidden or moe.shared_ffn_hidden % moe.ffn_hidden:
        yield (
            f"model.moe.shared_ffn_hidden={moe.shared_ffn_hidden} (choose a multiple of model.moe.ffn_hidden="
            f"{moe.ffn_hidden})"
        )
    if moe.groups and moe.top_k != 2 * moe.group_top_k:
        yield (
            f"model.moe.group_top_k={moe.group_top_k} (it ranks groups by their two best experts: set half of "
            f"model.moe.top_k={moe.top_k})"
        )


def _word(value: Any) -> str:
    """A value in the notation of settings."""
    return value if isinstance(value, str) else json.dumps(value)


def hf_config(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """Content of the model's config.json, for transformers and engines.

    Raises:
        InputError: No supported family matches the model, see `family_of`.
    """
    family = family_of(model)
    # The family maps most fields one to one; those below depend on more than one setting.
    written = {key: attrgetter(field)(model) for key, field in family.fields.items()} | dict(family.fixed)
    if "head_dim" in written:
        written["head_dim"] = head_channels(model)
    if family.partly_rotary:
        written["partial_rotary_factor"] = model.rope_fraction
    if family.layer_types:
        written["layer_types"] = layer_types(model.layers, model.full_every)
    if model.window_rope_base:
        written |= {
            "rope_local_base_freq": float(model.window_rope_base),
            # Releases of transformers without layer_types read this pattern. A pattern longer than the model makes
            # every layer a sliding one.
            "sliding_window_pattern": model.full_every or model.layers + 1,
        }
    return {
        "architectures": [family.architecture],
        "model_type": family.name,
        **written,
        "vocab_size": vocab_size,
        "rope_theta": float(model.rope_base),
        "rope_scaling": _rope_scaling(model, family),
        "initializer_range": model.init_std,
        "torch_dtype": {"fp32": "float32", "bf16": "bfloat16"}[model.dtype],
        **family.written(model),
    }


def _rope_scaling(model: ModelConfig, family: Family) -> dict[str, Any] | None:
    """Scaling of rotary positions in config.json."""
    for kind, (section, _) in ROPE.items():
        settings = getattr(model, section)
        if settings.factor > 1:
            written = {key: getattr(settings, field) for key, field in rope_fields(kind, family).items()}
            kept = {key: value for key, value in written.items() if key.startswith(("original", "truncate"))}
            return family.stretched(kind, {key: float(value) for key, value in written.items()} | kept)
    return dict(family.plain_rope) if family.plain_rope else None


# Fields that may differ without consequence, or that `differences` compares in a normalised form, because releases of
# transformers write them in different places.
_COMPARED_APART = (
    "architectures", "initializer_range", "max_position_embeddings", "torch_dtype", "partial_rotary_factor",
    "rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window", "sliding_window_pattern", "layer_types",
)  # fmt: skip


def differences(config: dict[str, Any], model: ModelConfig, vocab_size: int) -> list[str]:
    """Differences between a config.json and the model's own that make the same weights compute another function.

    `config` is the parsed config.json; each difference is a readable sentence.
    """
    wanted = hf_config(model, vocab_size) | {"quantization_config": None}
    if is_fp8(config.get("quantization_config")) or (is_mxfp4(config) and config["model_type"] == model.family):
        # How weights are stored does not change the function that they compute.
        config = config | {"quantization_config": None}
    free = {*_COMPARED_APART}
    theirs, ours = (family_in(each) for each in (config, wanted))
    if theirs and ours and (theirs.same_as or theirs.name) == (ours.same_as or ours.name):
        # Families that are the same architecture under two names may load each other's weights.
        free |= {"model_type"}
    unlike = {key: (said(config, key), value) for key, value in wanted.items() if key not in free}
    unlike |= _rope_differences(config, wanted)
    try:
        stated, own = windows(config, model.context), windows(wanted, model.context)
        unlike |= {f"model.{setting}": (stated[setting], own[setting]) for setting in own}
        problems = []
    except InputError as error:
        problems = [f"{error.where} ({error.what})"]
    problems += [f"{key} is {there}, not {here}" for key, (there, here) in unlike.items() if there != here]
    longest = config.get("max_position_embeddings") or 0
    # A longer context than configured is fine; a shorter one means positions that the model was never trained on.
    if longest < model.context:
        problems.append(f"max_position_embeddings is {longest}, below model.context={model.context}")
    return problems


def _rope_differences(config: dict[str, Any], wanted: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """{setting: (value in config.json, value of the model)} of the differing settings of rotary positions."""
    theirs, ours = rope(config), rope(wanted)
    pairs = {key: (theirs[key], ours[key]) for key in ("rope_theta", "rope_type", "partial_rotary_factor")}
    # The settings of a kind of scaling are compared only if both have that kind; otherwise the kinds already differ.
    kind = ours["rope_type"]
    if kind in ROPE and theirs["rope_type"] == kind:
        family = FAMILIES[wanted["model_type"]]
        settings = {key: ours[key] for key in rope_fields(kind, family)}
        # Set in a config.json, these would override the values that YaRN derives from the factor.
        if family.layers.yarn:
            settings |= dict.fromkeys(("mscale", "mscale_all_dim", "attention_factor"))
        elif kind == "yarn":
            settings |= {"mscale": ours["mscale"], "truncate": True}
            # An attention_factor in a config.json would override the value derived from factor and mscale.
            settings["attention_factor"] = None
        pairs |= {f"rope {key}": (theirs.get(key, YARN_ASSUMED.get(key)), value) for key, value in settings.items()}
    return pairs
