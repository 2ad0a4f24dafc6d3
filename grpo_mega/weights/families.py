"""Hugging Face family of a configuration, and its config.json."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from grpo_mega.config.huggingface.families import (
    ARCHITECTURES,
    BIASED,
    FIELDS,
    FIXED,
    PARTLY_ROTARY,
    ROPE,
    SAME_FUNCTION,
    WINDOWED,
    YARN_ASSUMED,
    is_mxfp4,
    layer_types,
    rope,
    rope_fields,
    said,
    windows,
)
from grpo_mega.config.schema import ModelConfig
from grpo_mega.models.body import has_balancing_bias, head_channels
from grpo_mega.weights.fp8 import is_fp8


def family(model: ModelConfig) -> str:
    """`model_type` of the Hugging Face family that computes the same function.

    Raises:
        ValueError: No family matches; names the fields that do not fit.
    """
    plain = "llama" if model.window is None else "ministral" if model.full_every else "mistral"
    dense = "gemma3_text" if model.gemma else "qwen3" if model.qk_norm else "qwen2" if model.qkv_bias else plain
    experts = "glm4_moe" if has_balancing_bias(model.moe) else "qwen3_moe"
    name = "deepseek_v3" if model.attention == "mla" else experts if model.moe.experts else dense
    name = "gpt_oss" if model.gpt_oss else name
    if problems := [*_obstacles(model, name)]:
        raise ValueError(f"{ARCHITECTURES[name]}, the closest Hugging Face model, cannot express {'; '.join(problems)}")
    return name


def _obstacles(model: ModelConfig, name: str) -> Iterator[str]:
    """Yields the fields whose values the family cannot express, with the values that it can."""
    moe = model.moe
    if name == "gpt_oss":
        yield from _obstacles_of_gpt_oss(model)
    elif model.qkv_bias and name not in ("qwen2", "glm4_moe"):
        yield "model.qkv_bias=true (set false)"
    if not model.qk_norm and name not in (*SAME_FUNCTION, "llama", "qwen2", "glm4_moe", "gpt_oss"):
        yield "model.qk_norm=false (it always has these norms: set true)"
    if model.mtp_layers and name not in BIASED:
        yield f"model.mtp_layers={model.mtp_layers} (set 0)"
    if model.window is not None and name not in WINDOWED:
        yield f"model.window={model.window} (set null)"
    for field in ("gemma", "window_rope_base", "query_pre_attn_scalar"):
        if getattr(model, field) and name != "gemma3_text":
            yield f"model.{field}={getattr(model, field)} (set {'false' if field == 'gemma' else 'null'})"
        if not getattr(model, field) and name == "gemma3_text":
            yield f"model.{field}={getattr(model, field)} (set it)"
    if model.window is None and name in ("gemma3_text", "gpt_oss"):
        yield "model.window=null (set it)"
    if model.rope_fraction != 1 and name not in PARTLY_ROTARY:
        yield f"model.rope_fraction={model.rope_fraction} (set 1)"
    if name not in BIASED:
        if moe.experts and moe.score != "softmax":
            yield f"model.moe.score={moe.score} (set softmax, and model.moe.bias_update_rate=0)"
        for field in ("shared_ffn_hidden", "groups") if moe.experts else ():
            if getattr(moe, field):
                yield f"model.moe.{field}={getattr(moe, field)} (set 0)"
        if moe.experts and moe.scaling != 1:
            yield f"model.moe.scaling={moe.scaling} (set 1)"
        return
    if not moe.experts:
        yield "model.moe.experts=0 (set above 0)"
        return
    if not has_balancing_bias(moe):
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


def _obstacles_of_gpt_oss(model: ModelConfig) -> Iterator[str]:
    """Yields the fields whose values GPT-OSS's layers cannot express."""
    moe = model.moe
    wanted = {"qkv_bias": True, "qk_norm": False, "attention": "gqa"}
    for field, value in wanted.items():
        if getattr(model, field) != value:
            yield f"model.{field}={getattr(model, field)} (set {value})"
    for field in ("experts", "first_dense"):
        if bool(getattr(moe, field)) != (field == "experts"):
            yield f"model.moe.{field}={getattr(moe, field)} (set {'above 0' if field == 'experts' else '0'})"
    if has_balancing_bias(moe):
        yield f"model.moe.bias_update_rate={moe.bias_update_rate} (set 0, and model.moe.frozen_bias=false)"
    if model.ffn_hidden != moe.ffn_hidden:
        yield f"model.ffn_hidden={model.ffn_hidden} (set model.moe.ffn_hidden={moe.ffn_hidden}: it has one number)"
    if model.yarn.factor > 1 and model.yarn.mscale != 1:
        yield f"model.yarn.mscale={model.yarn.mscale} (set 1)"
    if model.llama3_rope.factor > 1:
        yield f"model.llama3_rope.factor={model.llama3_rope.factor} (set 1)"


def hf_config(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """Content of the model's config.json, for transformers and engines.

    Raises:
        ValueError: No supported family matches the model, see `family`.
    """
    name = family(model)
    written = {key: attrgetter(field)(model) for key, field in FIELDS[name].items()} | FIXED[name]
    if "head_dim" in written:
        written["head_dim"] = head_channels(model)
    if name in PARTLY_ROTARY:
        written["partial_rotary_factor"] = model.rope_fraction
    if name in ("ministral", "gemma3_text", "gpt_oss"):
        written["layer_types"] = layer_types(model.layers, model.full_every)
    if model.window_rope_base:
        written |= {
            "rope_local_base_freq": float(model.window_rope_base),
            "sliding_window_pattern": model.full_every or model.layers + 1,  # before layer_types existed
        }
    return {
        "architectures": [ARCHITECTURES[name]],
        "model_type": name,
        **written,
        "vocab_size": vocab_size,
        "rope_theta": float(model.rope_base),
        "rope_scaling": _rope_scaling(model, name),
        "initializer_range": model.init_std,
        "torch_dtype": {"fp32": "float32", "bf16": "bfloat16"}[model.dtype],
        **_of_experts(model, name),
    }


def _rope_scaling(model: ModelConfig, name: str) -> dict[str, Any] | None:
    """Scaling of rotary positions in config.json; None for plain ones."""
    for kind, (room, _) in ROPE.items():
        settings = getattr(model, room)
        if settings.factor > 1:
            written = {key: getattr(settings, field) for key, field in rope_fields(kind, name).items()}
            kept = {key: value for key, value in written.items() if key.startswith(("original", "truncate"))}
            written = {key: float(value) for key, value in written.items()} | kept
            if name == "deepseek_v3":  # under the names that DeepSeek's own code knows
                return {"type": kind, **written, "mscale": written["mscale_all_dim"]}
            return {"rope_type": kind, **written}
    return {"rope_type": "default"} if name == "gpt_oss" else None  # else it would be scaled


def _of_experts(model: ModelConfig, name: str) -> dict[str, Any]:
    """Expert settings that the two kinds of files express with other numbers than `MoEConfig`."""
    moe = model.moe
    if name == "qwen3_moe":
        return {"mlp_only_layers": [*range(moe.first_dense)]}
    if name in BIASED:
        return {
            "n_shared_experts": moe.shared_ffn_hidden // moe.ffn_hidden,
            "n_group": moe.groups or 1,
            "topk_group": moe.group_top_k or 1,
            "norm_topk_prob": moe.top_k > 1,
        }
    return {}


_COMPARED_APART = (
    "architectures", "initializer_range", "max_position_embeddings", "torch_dtype", "partial_rotary_factor",
    "rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window", "sliding_window_pattern", "layer_types",
)  # fmt: skip


def differences(config: dict[str, Any], model: ModelConfig, vocab_size: int) -> list[str]:
    """Differences of a config.json from the model's own, by which the same weights would compute another function.

    `config` is the parsed config.json; each difference is a readable sentence.
    """
    wanted = hf_config(model, vocab_size) | {"quantization_config": None}
    if is_fp8(config.get("quantization_config")) or (is_mxfp4(config) and model.gpt_oss):
        config = config | {"quantization_config": None}  # describes storage of weights, not the function
    free = {*_COMPARED_APART}
    if {config.get("model_type"), wanted["model_type"]} <= {*SAME_FUNCTION, "llama"}:  # these differ only in windows
        free.add("model_type")
    unlike = {key: (said(config, key), value) for key, value in wanted.items() if key not in free}
    unlike |= _rope_differences(config, wanted)
    try:
        theirs, ours = windows(config, model.context), windows(wanted, model.context)
        unlike |= {f"model.{setting}": (theirs[setting], ours[setting]) for setting in ours}
        problems = []
    except ValueError as error:
        problems = [str(error)]
    problems += [f"{key} is {theirs}, not {ours}" for key, (theirs, ours) in unlike.items() if theirs != ours]
    longest = config.get("max_position_embeddings") or 0
    if longest < model.context:
        problems.append(f"max_position_embeddings is {longest}, below model.context={model.context}")
    return problems


def _rope_differences(config: dict[str, Any], wanted: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """{setting: (value in config.json, value of the model)} of the differing settings of rotary positions."""
    theirs, ours = rope(config), rope(wanted)
    pairs = {key: (theirs[key], ours[key]) for key in ("rope_theta", "rope_type", "partial_rotary_factor")}
    kind = ours["rope_type"]
    if kind in ROPE and theirs["rope_type"] == kind:
        settings = {key: ours[key] for key in rope_fields(kind, wanted["model_type"])}
        if wanted["model_type"] == "gpt_oss":  # these would override values derived from the factor
            settings |= dict.fromkeys(("mscale", "mscale_all_dim", "attention_factor"))
        elif kind == "yarn":
            settings |= {"mscale": ours["mscale"], "truncate": True}
            settings["attention_factor"] = None  # which would override the value derived from factor and mscale
        pairs |= {f"rope {key}": (theirs.get(key, YARN_ASSUMED.get(key)), value) for key, value in settings.items()}
    return pairs
