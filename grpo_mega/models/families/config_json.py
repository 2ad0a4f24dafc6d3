"""The keys of a Hugging Face config.json, as transformers 4 and 5 write them: values, defaults, positions, windows.

Both directions read with it: `hf_folder.py`, and `grpo_mega/weights/hf_config.py`, which writes.
"""

from __future__ import annotations

from typing import Any

from grpo_mega.errors import InputError
from grpo_mega.models.families import FAMILIES, Family
from grpo_mega.models.families.family import FoundConfig

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


def rope_fields(kind: str, family: Family) -> dict[str, str]:
    """Key in the config.json of a family -> field, for the settings of scaled rotary positions; see `ROPE`."""
    fields = ROPE[kind][1]
    if not family.layers.yarn:
        return fields
    return {key: field for key, field in fields.items() if field != "mscale"} | {"truncate": "truncate"}


RENAMED = {
    "n_routed_experts": "num_local_experts",
    "num_experts": "num_local_experts",
    "num_nextn_predict_layers": "num_mtp_layers",
}
"""Key -> its new name in the config.json written by transformers 5."""


def family_in(found: FoundConfig) -> Family | None:
    """The family of a config.json; None for one that is not supported."""
    return FAMILIES.get(str(found.get("model_type")))


def said(found: dict[str, Any], key: str) -> Any:
    """Value of a config.json key, in the names of transformers 4 or 5, or its default."""
    family = family_in(found)
    assumed = ASSUMED | dict(family.assumed if family else {})
    # These two defaults depend on other keys.
    if found.get(key) is None and key == "head_dim" and family and not family.has_head_dim:
        return (found.get("hidden_size") or 0) // (found.get("num_attention_heads") or 1)
    if found.get(key) is None and key == "num_key_value_heads" and (found.get("model_type") == "llama" or key in found):
        return found.get("num_attention_heads")
    if key in found and (found[key] is not None or key in NULL_COUNTS):
        return found[key]
    value = found.get(RENAMED.get(key, key))
    return value if value is not None else assumed.get(key)


def rope(found: dict[str, Any]) -> dict[str, Any]:
    """Settings of rotary positions, always with `rope_theta`, `rope_type` and `partial_rotary_factor`."""
    # A config.json that says nothing but its family: with it `said` gives the defaults of the family.
    silent = {"model_type": found.get("model_type")}
    # transformers 5 writes `rope_parameters`, earlier versions `rope_scaling`.
    stated = found.get("rope_parameters") or found.get("rope_scaling")
    stated = stated or said(silent, "rope_scaling") or {}
    # Layers with a window may have other settings, which `inner_rope` reads.
    stated = stated.get("full_attention") or stated
    # A null counts as missing, except in `truncate`, where it means false.
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
    family = family_in(found)
    return family is not None and family.mxfp4 and given.get("quant_method") == "mxfp4"


def sliding_window(found: dict[str, Any]) -> int | None:
    """Window of a model that may do without it, in tokens, the token itself included; None without one."""
    family, layers = family_in(found), found.get("layer_types") or [None]
    if family is None or family.window != "may" or (family.layer_types and {*layers} == {"full_attention"}):
        return None
    return said(found, "sliding_window")


def layer_types(layers: int, full_every: int) -> list[str]:
    """config.json's layer types: sliding window, or full attention in every `full_every`-th layer (0: none)."""
    full = [bool(full_every) and number % full_every == 0 for number in range(1, layers + 1)]
    return ["full_attention" if is_full else "sliding_attention" for is_full in full]


def full_every(found: dict[str, Any]) -> int:
    """Period of the layers with full attention: 1 for all layers, 0 for none.

    Raises:
        InputError: The layers with full attention are not evenly spaced.
    """
    family = FAMILIES[found["model_type"]]
    usual = (family.inner_rope and found.get("sliding_window_pattern")) or family.full_every
    layers = found.get("num_hidden_layers", 0)
    stated = found.get("layer_types") or layer_types(layers, usual)
    # The first layer with full attention determines the period; the list is then compared with that pattern.
    every = stated.index("full_attention") + 1 if "full_attention" in stated else 0
    if stated != layer_types(layers, every) or (family.inner_rope and every == 1):
        what = "only layers with full attention at equal distances"
        raise InputError(f"layer_types={stated}", what, "choose a model in which every n-th layer has it")
    return every


def inner_rope(found: dict[str, Any]) -> dict[str, Any]:
    """Rotary positions of layers with a window: `rope_theta` and, if it is stated, `rope_type`."""
    inner = (found.get("rope_parameters") or {}).get("sliding_attention") or {}
    return inner | {"rope_theta": inner.get("rope_theta") or found.get("rope_local_base_freq") or 10000.0}


def windows(found: dict[str, Any], context: float) -> dict[str, Any]:
    """Settings of a model's sliding windows, for sequences of up to `context` tokens.

    A window that covers the context is dropped where the family may do without it.

    Raises:
        InputError: See `full_every`.
    """
    family = family_in(found)
    must = family is not None and family.window == "must"
    window = said(found, "sliding_window") if must else sliding_window(found)
    if not must and (window is None or window >= context):
        return {"window": None, "full_every": 0, "window_rope_base": None}
    base = int(inner_rope(found)["rope_theta"]) if family and family.inner_rope else None
    return {"window": window, "full_every": full_every(found), "window_rope_base": base}
