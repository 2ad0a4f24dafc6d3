"""Which Hugging Face model a configuration is, and its config.json: Llama, Qwen3, Qwen3-MoE and DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from grpo_mega.config.schema import ModelConfig, YarnConfig
from grpo_mega.models.body import has_balancing_bias, head_channels
from grpo_mega.weights.fp8 import is_fp8

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
"""transformers' `model_type` and class."""

ASSUMED: dict[str, Any] = {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "mlp_bias": False,
    "mlp_only_layers": [],
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "quantization_config": None,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "use_sliding_window": False,
}
"""What a config.json means that does not say."""

YARN_ASSUMED: dict[str, Any] = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
"""What YaRN's settings mean that do not say."""

RENAMED = {
    "n_routed_experts": "num_local_experts",
    "num_experts": "num_local_experts",
    "num_nextn_predict_layers": "num_mtp_layers",
}
"""What the config.json that transformers 5 writes calls a field."""


def family(model: ModelConfig) -> str:
    """The `model_type` that computes the same function.

    Raises:
        ValueError: There is none; names the fields that stand in the way.
    """
    dense = "qwen3" if model.qk_norm else "llama"
    name = "deepseek_v3" if model.attention == "mla" else "qwen3_moe" if model.moe.experts else dense
    if problems := [*_obstacles(model, name)]:
        raise ValueError(f"{ARCHITECTURES[name]}, the closest Hugging Face model, cannot express {'; '.join(problems)}")
    return name


def _obstacles(model: ModelConfig, name: str) -> Iterator[str]:
    """Fields with a value that the family has no room for, and the values that it has."""
    moe = model.moe
    if not model.qk_norm and name != "llama":
        yield "model.qk_norm=false (it always has these norms: set true)"
    if name != "deepseek_v3":
        if model.mtp_layers:
            yield f"model.mtp_layers={model.mtp_layers} (set 0)"
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


def hf_config(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """The config.json of the model, for transformers and engines.

    Raises:
        ValueError: No supported family describes the model, see `family`.
    """
    name = family(model)
    own = {"llama": _llama, "qwen3": _qwen3, "qwen3_moe": _qwen3_moe, "deepseek_v3": _deepseek_v3}[name]
    return {
        "architectures": [ARCHITECTURES[name]],
        "model_type": name,
        "vocab_size": vocab_size,
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "intermediate_size": model.ffn_hidden,
        "hidden_act": "silu",
        "max_position_embeddings": model.context,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": float(model.rope_base),
        "rope_scaling": _yarn(model.yarn) if model.yarn.factor > 1 else None,
        "tie_word_embeddings": model.tie_embeddings,
        "attention_bias": False,
        "initializer_range": model.init_std,
        "torch_dtype": {"fp32": "float32", "bf16": "bfloat16"}[model.dtype],
        **own(model),
    }


def _yarn(yarn: YarnConfig) -> dict[str, Any]:
    return {
        "type": "yarn",
        "factor": float(yarn.factor),
        "original_max_position_embeddings": yarn.original_context,
        "beta_fast": float(yarn.beta_fast),
        "beta_slow": float(yarn.beta_slow),
        "mscale": float(yarn.mscale),
        "mscale_all_dim": float(yarn.mscale),
    }


def _llama(model: ModelConfig) -> dict[str, Any]:
    return {"head_dim": head_channels(model), "mlp_bias": False}


def _qwen3(model: ModelConfig) -> dict[str, Any]:
    return {"head_dim": head_channels(model), "use_sliding_window": False}


def _qwen3_moe(model: ModelConfig) -> dict[str, Any]:
    moe = model.moe
    return _qwen3(model) | {
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.ffn_hidden,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [*range(moe.first_dense)],
    }


def _deepseek_v3(model: ModelConfig) -> dict[str, Any]:
    moe, mla = model.moe, model.mla
    return {
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_head_dim,
        "qk_rope_head_dim": mla.qk_rope_dim,
        "v_head_dim": mla.v_head_dim,
        "rope_interleave": True,
        "n_routed_experts": moe.experts,
        "n_shared_experts": moe.shared_ffn_hidden // moe.ffn_hidden,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.ffn_hidden,
        "first_k_dense_replace": moe.first_dense,
        "moe_layer_freq": 1,
        "n_group": moe.groups or 1,
        "topk_group": moe.group_top_k or 1,
        "routed_scaling_factor": moe.scaling,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": moe.top_k > 1,
        "num_nextn_predict_layers": model.mtp_layers,
    }


def differences(found: dict[str, Any], model: ModelConfig, vocab_size: int) -> list[str]:
    """What a config.json says otherwise than the model's own would, and so another function of the same weights."""
    wanted = hf_config(model, vocab_size) | {"quantization_config": None}
    free = (
        "architectures",
        "initializer_range",
        "max_position_embeddings",
        "rope_theta",
        "rope_scaling",
        "torch_dtype",
    )
    if is_fp8(found.get("quantization_config")):
        found = found | {"quantization_config": None}  # it is of the file, not of the model
    unlike = {key: (_said(found, key), value) for key, value in wanted.items() if key not in free}
    unlike |= _rope_differences(found, wanted)
    problems = [f"{key} is {theirs}, not {ours}" for key, (theirs, ours) in unlike.items() if theirs != ours]
    longest = found.get("max_position_embeddings", 0)
    if longest < model.context:
        problems.append(f"max_position_embeddings is {longest}, below model.context={model.context}")
    return problems


def _rope_differences(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """{what: (theirs, ours)} of all that rotary positions depend on."""
    theirs = found.get("rope_parameters") or found.get("rope_scaling") or {}  # transformers 5; before
    ours = wanted["rope_scaling"] or {}
    pairs = {
        "rope_theta": (theirs.get("rope_theta", found.get("rope_theta")), wanted["rope_theta"]),
        "rope_type": (theirs.get("rope_type", theirs.get("type", "default")), ours.get("type", "default")),
    }
    if "yarn" == pairs["rope_type"][0] == pairs["rope_type"][1]:
        settings = {key: value for key, value in ours.items() if key != "type"} | {"truncate": True}
        settings["attention_factor"] = None  # which would replace what follows from factor and mscale
        pairs |= {f"rope {key}": (theirs.get(key, YARN_ASSUMED.get(key)), value) for key, value in settings.items()}
    return pairs


def _said(found: dict[str, Any], key: str) -> Any:
    if key == "head_dim" and found.get("head_dim") is None and found.get("model_type") == "llama":
        return found.get("hidden_size", 0) // (found.get("num_attention_heads") or 1)
    return found.get(key, found.get(RENAMED.get(key, key), ASSUMED.get(key)))
