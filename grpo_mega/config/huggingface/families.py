"""Tables of the keys in a Hugging Face config.json for the fields of `ModelConfig`, by family.

The tables serve both directions: `architecture.py` reads with them, `grpo_mega/weights/families.py` writes.
"""

from __future__ import annotations

from typing import Any

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
"""Family -> class in transformers; the keys are transformers' `model_type`."""

SAME_FUNCTION = {"mistral": "llama", "ministral": "llama"}
"""Families with a sliding window -> family that computes the same from the same tensors within the window."""

_ALL = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "ffn_hidden",
    "max_position_embeddings": "context",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}
_GROUPED = _ALL | {"head_dim": "head_dim"}
_WINDOW = {"sliding_window": "window"}
_EXPERTS = {"num_experts_per_tok": "moe.top_k", "moe_intermediate_size": "moe.ffn_hidden"}
_BIASED_EXPERTS = _EXPERTS | {
    "n_routed_experts": "moe.experts",
    "first_k_dense_replace": "moe.first_dense",
    "routed_scaling_factor": "moe.scaling",
    "num_nextn_predict_layers": "mtp_layers",
}
FIELDS: dict[str, dict[str, str]] = {
    "llama": _GROUPED,
    "mistral": _GROUPED | _WINDOW,
    "ministral": _GROUPED | _WINDOW,
    "gemma3_text": _GROUPED | _WINDOW | {"query_pre_attn_scalar": "query_pre_attn_scalar"},
    "qwen2": _GROUPED,
    "qwen3": _GROUPED,
    "qwen3_moe": _GROUPED | _EXPERTS | {"num_experts": "moe.experts"},
    "glm4_moe": _GROUPED | _BIASED_EXPERTS | {"use_qk_norm": "qk_norm", "attention_bias": "qkv_bias"},
    "deepseek_v3": _ALL | _BIASED_EXPERTS | {
        "q_lora_rank": "mla.q_lora_rank",
        "kv_lora_rank": "mla.kv_lora_rank",
        "qk_nope_head_dim": "mla.qk_head_dim",
        "qk_rope_head_dim": "mla.qk_rope_dim",
        "v_head_dim": "mla.v_head_dim",
    },
    "gpt_oss": _GROUPED | _WINDOW | {
        "intermediate_size": "moe.ffn_hidden",
        "num_experts_per_tok": "moe.top_k",
        "num_local_experts": "moe.experts",
    },
}  # fmt: skip
"""Family -> key of its config.json -> field of `ModelConfig` with the same value."""

_SAME = {"hidden_act": "silu", "attention_bias": False}
FIXED: dict[str, dict[str, Any]] = {
    "llama": _SAME | {"mlp_bias": False},
    "mistral": _SAME,
    "ministral": _SAME,
    "gemma3_text": {
        "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "use_bidirectional_attention": False,
    },
    "qwen2": {"hidden_act": "silu", "use_sliding_window": False},
    "qwen3": _SAME | {"use_sliding_window": False},
    "qwen3_moe": _SAME | {"use_sliding_window": False, "decoder_sparse_step": 1, "norm_topk_prob": True},
    "glm4_moe": {"hidden_act": "silu"},
    "deepseek_v3": _SAME | {
        "rope_interleave": True, "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    },
    "gpt_oss": {"hidden_act": "silu", "attention_bias": True, "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
}  # fmt: skip
"""Family -> values its config.json must have, as no field of `ModelConfig` can express others."""

BIASED = ("glm4_moe", "deepseek_v3")
"""Families whose routers have a balancing bias; they also have shared experts and prediction modules."""

WINDOWED = ("mistral", "ministral", "gemma3_text", "gpt_oss")
"""Families with a sliding window in some or all layers."""

PARTLY_ROTARY = ("glm4_moe",)
"""Families in which only a part of a head's channels may have rotary positions."""

# The bias was frozen at the end of pre-training.
_FROZEN = {"score": "sigmoid", "bias_update_rate": 0.0, "frozen_bias": True}
ALWAYS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "ministral": {},
    "gemma3_text": {"qk_norm": True, "gemma": True},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True, "moe": {"score": "softmax", "bias_update_rate": 0.0}},
    "glm4_moe": {"moe": _FROZEN},
    "deepseek_v3": {"attention": "mla", "qk_norm": True, "moe": _FROZEN},
    "gpt_oss": {"gpt_oss": True, "qkv_bias": True, "moe": {"score": "softmax", "bias_update_rate": 0.0}},
}
"""Family -> settings shared by all of its models."""

ASSUMED: dict[str, Any] = {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "hidden_activation": "gelu_pytorch_tanh",
    "mlp_bias": False,
    "mlp_only_layers": [],
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_interleave": True,
    "rope_theta": 10000.0,
    "scoring_func": "sigmoid",
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "use_bidirectional_attention": False,
    "use_qk_norm": False,
    "use_sliding_window": False,
}
"""Default of a config.json key that is missing."""

ASSUMED_OF: dict[str, dict[str, Any]] = {
    "glm4_moe": {
        "n_group": 1, "norm_topk_prob": True, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "topk_group": 1,
    },
    "deepseek_v3": {"n_group": 8, "norm_topk_prob": True, "topk_group": 4},
    "gemma3_text": {"head_dim": 256, "rope_theta": 1e6, "tie_word_embeddings": True},
    "gpt_oss": {
        "attention_bias": True, "head_dim": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False,
        },
        "sliding_window": 128, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
    },
}  # fmt: skip
"""Family -> defaults of missing config.json keys that differ from `ASSUMED`."""

NULL_COUNTS = {
    "decoder_sparse_step", "head_dim", "hidden_act", "hidden_activation", "n_group", "norm_topk_prob",
    "q_lora_rank", "query_pre_attn_scalar", "rms_norm_eps", "rope_interleave", "sliding_window", "tie_word_embeddings",
    "topk_group",
}  # fmt: skip
"""Keys for which null differs from being missing: null means none or false, or transformers refuses it."""

YARN_ASSUMED: dict[str, Any] = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
"""Defaults of missing YaRN settings."""

ROPE: dict[str, tuple[str, dict[str, str]]] = {
    "yarn": ("yarn", {
        "factor": "factor", "original_max_position_embeddings": "original_context", "beta_fast": "beta_fast",
        "beta_slow": "beta_slow", "mscale_all_dim": "mscale",
    }),
    "llama3": ("llama3_rope", {
        "factor": "factor", "original_max_position_embeddings": "original_context",
        "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
    }),
}  # fmt: skip
"""`rope_type` -> field of `ModelConfig` with its settings, and their keys in config.json."""


def rope_fields(kind: str, name: str) -> dict[str, str]:
    """Key in the config.json of a family -> field, for the settings of scaled rotary positions; see `ROPE`."""
    fields = ROPE[kind][1]
    if name != "gpt_oss":
        return fields
    return {key: field for key, field in fields.items() if field != "mscale"} | {"truncate": "truncate"}


RENAMED = {
    "n_routed_experts": "num_local_experts",
    "num_experts": "num_local_experts",
    "num_nextn_predict_layers": "num_mtp_layers",
}
"""Key -> its new name in the config.json written by transformers 5."""


def said(found: dict[str, Any], key: str) -> Any:
    """Value of a config.json key, in the names of transformers 4 or 5, or its default."""
    name = found.get("model_type")
    if found.get(key) is None and key == "head_dim" and name in (*SAME_FUNCTION, "llama", "qwen2", "glm4_moe"):
        return (found.get("hidden_size") or 0) // (found.get("num_attention_heads") or 1)
    if found.get(key) is None and key == "num_key_value_heads" and (name == "llama" or key in found):
        return found.get("num_attention_heads")
    if key in found and (found[key] is not None or key in NULL_COUNTS):
        return found[key]
    value = found.get(RENAMED.get(key, key))
    return value if value is not None else (ASSUMED | ASSUMED_OF.get(str(name), {})).get(key)


def rope(found: dict[str, Any]) -> dict[str, Any]:
    """Settings of rotary positions, always with `rope_theta`, `rope_type` and `partial_rotary_factor`."""
    silent = {"model_type": found.get("model_type")}
    stated = found.get("rope_parameters") or found.get("rope_scaling")  # transformers 5; before
    stated = stated or said(silent, "rope_scaling") or {}
    stated = stated.get("full_attention") or stated  # Gemma's layers with a window have settings of their own
    null_is_false = {"truncate": bool(stated["truncate"])} if "truncate" in stated else {}
    stated = {key: value for key, value in stated.items() if value is not None} | null_is_false
    stated = stated | {"rope_type": stated.get("rope_type", stated.get("type", "default"))}
    rotary = "partial_rotary_factor"
    part = next(x for x in (stated.get(rotary), found.get(rotary), said(silent, rotary)) if x is not None)
    return {"rope_theta": found.get("rope_theta") or said(silent, "rope_theta")} | stated | {rotary: part}


def is_mxfp4(found: dict[str, Any]) -> bool:
    """Whether a config.json declares experts stored in 4 bits (weights/mxfp4.py)."""
    quantisation = found.get("quantization_config")
    given = quantisation if isinstance(quantisation, dict) else {}
    return found.get("model_type") == "gpt_oss" and given.get("quant_method") == "mxfp4"


def sliding_window(found: dict[str, Any]) -> int | None:
    """Sliding window of a Mistral or Ministral model, in tokens, the token itself included; None without one."""
    kind, layers = found.get("model_type"), found.get("layer_types") or [None]
    if kind not in SAME_FUNCTION or (kind == "ministral" and {*layers} == {"full_attention"}):
        return None
    return said(found, "sliding_window")


def layer_types(layers: int, full_every: int) -> list[str]:
    """config.json's layer types: sliding window, or full attention in every `full_every`-th layer (0: none)."""
    full = [bool(full_every) and number % full_every == 0 for number in range(1, layers + 1)]
    return ["full_attention" if is_full else "sliding_attention" for is_full in full]


def full_every(found: dict[str, Any]) -> int:
    """Period of the layers with full attention: 1 for all layers, 0 for none.

    Raises:
        ValueError: The layers with full attention are not evenly spaced.
    """
    layers, usual = found.get("num_hidden_layers", 0), {"gemma3_text": 6, "gpt_oss": 2}.get(found["model_type"], 0)
    if found["model_type"] == "gemma3_text":
        usual = found.get("sliding_window_pattern") or usual
    stated = found.get("layer_types") or layer_types(layers, usual)
    every = stated.index("full_attention") + 1 if "full_attention" in stated else 0
    if stated != layer_types(layers, every) or (found["model_type"] == "gemma3_text" and every == 1):
        raise ValueError(f"layer_types={stated} (layers without a window have to come at equal distances)")
    return every


def windows(found: dict[str, Any], context: float) -> dict[str, Any]:
    """Settings of a model's sliding windows, for sequences of up to `context` tokens.

    For Mistral and Ministral, a window that covers the context is dropped.

    Raises:
        ValueError: See `full_every`.
    """
    if found.get("model_type") == "gemma3_text":
        inner = (found.get("rope_parameters") or {}).get("sliding_attention") or {}
        base = inner.get("rope_theta") or found.get("rope_local_base_freq") or 10000.0
        window, every = said(found, "sliding_window"), full_every(found)
        return {"window": window, "full_every": every, "window_rope_base": int(base)}
    if found.get("model_type") == "gpt_oss":
        return {"window": said(found, "sliding_window"), "full_every": full_every(found), "window_rope_base": None}
    window = sliding_window(found)
    if window is None or window >= context:
        return {"window": None, "full_every": 0, "window_rope_base": None}
    return {"window": window, "full_every": full_every(found), "window_rope_base": None}
