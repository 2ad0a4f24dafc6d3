"""Models that none of the supported families can express in its config.json are refused, with the field."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from operator import attrgetter
from typing import Any, get_args, get_type_hints

import pytest

from grpo_mega.platform import start

start()  # before megatron.core is imported

from huggingface_models import MODELS, VOCAB  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402

from grpo_mega.config.limits import Interval, OneOf, limits_of, needs_of  # noqa: E402
from grpo_mega.config.schema import ModelConfig  # noqa: E402
from grpo_mega.errors import InputError  # noqa: E402
from grpo_mega.models.families import FAMILIES  # noqa: E402
from grpo_mega.models.families.family import COUNTS, FLAGS, MAY_BE_NULL, NUMBERS  # noqa: E402
from grpo_mega.models.families.hf_folder import settings_of  # noqa: E402
from grpo_mega.weights.hf_config import hf_config  # noqa: E402

# What no family can express -> the field that is named.
UNKNOWN: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("qwen3", {"mtp_layers": 1}, {}, r"Qwen3ForCausalLM, the closest .* cannot express model.mtp_layers=1 \(set 0\)"),
    ("qwen3_moe", {"qk_norm": False}, {}, "model.qk_norm=false"),
    ("qwen3_moe", {}, {"score": "sigmoid"}, "Qwen3MoeForCausalLM, the closest .* model.moe.score=sigmoid"),
    ("qwen3_moe", {}, {"shared_ffn_hidden": 16}, "model.moe.shared_ffn_hidden=16"),
    ("qwen3_moe", {}, {"groups": 2, "group_top_k": 1}, "model.moe.groups=2"),
    ("qwen3_moe", {}, {"scaling": 2.5}, "model.moe.scaling=2.5"),
    ("glm4_moe", {}, {"shared_ffn_hidden": 0}, "Glm4MoeForCausalLM, the closest .* model.moe.shared_ffn_hidden=0"),
    ("qwen3", {"rope_fraction": 0.5}, {}, "model.rope_fraction=0.5"),
    ("qwen3", {"window": 8}, {}, r"model.window=8 \(set null\)"),
    ("qwen3", {"query_pre_attn_scalar": 8}, {}, r"model.query_pre_attn_scalar=8 \(set null\)"),
    ("gemma3", {"window_rope_base": None}, {}, r"Gemma3.* model.window_rope_base=None \(set it\)"),
    ("deepseek_v3", {"qk_norm": False}, {}, "DeepseekV3ForCausalLM, the closest .* model.qk_norm=false"),
    ("deepseek_v3", {}, {"experts": 0}, "model.moe.experts=0"),
    ("deepseek_v3", {}, {"bias_update_rate": 0.0}, "model.moe.bias_update_rate=0"),
    ("deepseek_v3", {}, {"shared_ffn_hidden": 0}, "model.moe.shared_ffn_hidden=0"),
    ("deepseek_v3", {}, {"shared_ffn_hidden": 24}, "model.moe.shared_ffn_hidden=24"),
    ("deepseek_v3", {}, {"group_top_k": 1}, "model.moe.group_top_k=1"),
]


@pytest.mark.parametrize(("name", "model", "moe", "message"), UNKNOWN, ids=[message for *_, message in UNKNOWN])
def test_a_model_of_no_family_is_refused(name: str, model: dict[str, Any], moe: dict[str, Any], message: str) -> None:
    known = MODELS[name]
    with pytest.raises(ValueError, match=message):
        hf_config(replace(known, **model, moe=replace(known.moe, **moe)), VOCAB)


def leaves(schema: type = ModelConfig, prefix: str = "") -> dict[str, Any]:
    """{dotted name of a setting: its type}."""
    hints, found = get_type_hints(schema), {}
    for field in fields(schema):
        kind = hints[field.name]
        found |= leaves(kind, f"{field.name}.") if is_dataclass(kind) else {f"{prefix}{field.name}": kind}
    return found


def other_than(value: Any, name: str) -> Any:
    """Another value that the setting may have."""
    limit = limits_of(ModelConfig).get(name)
    if isinstance(limit, OneOf):
        return next(word for word in limit.choices if word != value)
    if isinstance(value, bool):
        return not value
    nearby = (6,) if value is None else (value + 2, value / 2)
    return next(type(value or 6)(x) for x in nearby if x != value and (limit is None or x in limit))


def with_value(model: ModelConfig, name: str, value: Any) -> ModelConfig:
    section, _, field = name.rpartition(".")
    if not section:
        return replace(model, **{field: value})
    return replace(model, **{section: replace(getattr(model, section), **{field: value})})


OF_TRAINING = {
    "init_std", "vocab_multiple", "mtp_loss_coef", "moe.aux_loss_coef", "moe.z_loss_coef", "moe.bias_update_rate",
    "moe.frozen_bias",
}  # fmt: skip
"""What no config.json states, and no weight depends on."""
NEEDS = needs_of(ModelConfig)


@pytest.mark.parametrize("name", MODELS)
def test_every_other_value_of_a_setting_is_written_or_refused(name: str) -> None:
    """A setting that a family forgot would be exported as if it had its default."""
    model = replace(MODELS[name], layers=8)
    for setting in [one for one in leaves() if one not in OF_TRAINING | {"family", "vocab_size"}]:
        other = other_than(attrgetter(setting)(model), setting)
        changed = with_value(model, setting, other)
        idle = {"moe": not changed.moe.experts, "mla": changed.attention != "mla"}
        idle |= {rope: getattr(changed, rope).factor == 1 for rope in ("yarn", "llama3_rope")}
        unmet = any(attrgetter(need.other)(changed) not in need.values for need in NEEDS.get(setting, ()))
        unmet |= setting == "moe.group_top_k" and not model.moe.groups
        if unmet or idle.get(setting.rpartition(".")[0]):
            continue
        try:
            found = hf_config(changed, VOCAB)
        except InputError:
            continue
        read = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConfig), settings_of(found)))
        assert attrgetter(setting)(read) == other, setting


@pytest.mark.parametrize("name", MODELS)
def test_what_matters_to_training_alone_is_no_obstacle(name: str) -> None:
    """Nor does it change what is written, but for the deviation of initial weights."""
    known = MODELS[name]
    for setting in OF_TRAINING - {"moe.bias_update_rate", "moe.frozen_bias"}:
        changed = with_value(known, setting, other_than(attrgetter(setting)(known), setting))
        written, before = hf_config(changed, VOCAB), hf_config(known, VOCAB)
        assert written | {"initializer_range": None} == before | {"initializer_range": None}, setting


def test_experts_that_qwen_cannot_have_are_compared_with_qwens() -> None:
    with pytest.raises(InputError, match=r"Qwen3MoeForCausalLM, .* model.moe.score=sigmoid \(set softmax"):
        hf_config(with_value(MODELS["qwen3"], "moe.experts", 2), VOCAB)


def test_the_kinds_of_what_families_state_are_those_of_the_settings() -> None:
    """But for the number of experts, which is 0 in no model of a family that states it."""
    for setting in {field for family in FAMILIES.values() for field in family.fields.values()} - {"moe.experts"}:
        kind, limit = leaves()[setting], limits_of(ModelConfig).get(setting)
        assert (kind is float) == (setting in NUMBERS), setting
        assert (kind is bool) == (setting in FLAGS), setting
        if setting not in NUMBERS | FLAGS:
            assert isinstance(limit, Interval)
            assert (0 in limit) == (setting in COUNTS), setting
    assert all(type(None) in get_args(leaves()[setting]) for setting in MAY_BE_NULL)
