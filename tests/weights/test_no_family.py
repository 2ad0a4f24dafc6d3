"""Models that none of the supported families can express in its config.json are refused, with the field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from grpo_mega.platform import start

start()  # before megatron.core is imported

from huggingface_models import MODELS, VOCAB  # noqa: E402

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
