"""The presets are the released models: their config.json, as published, differs in nothing that matters."""

from __future__ import annotations

from typing import Any

import pytest
from composed import composed

from grpo_mega.platform import start

start()  # before megatron.core is imported

from grpo_mega.weights.hf_config import differences  # noqa: E402

COMMON = {"attention_bias": False, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
LATENT = COMMON | {
    "model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "moe_layer_freq": 1, "seq_aux": True, "aux_loss_alpha": 0.001,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "r1zero_671b": LATENT | {
        "architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 3, "hidden_size": 7168,
        "initializer_range": 0.02, "intermediate_size": 18432, "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "rms_norm_eps": 1e-06, "rope_theta": 10000,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "routed_scaling_factor": 2.5, "topk_group": 4, "vocab_size": 129280,
    },
    "moonlight_16b": LATENT | {
        "architectures": ["DeepseekV3ForCausalLM"], "ep_size": 1, "pretraining_tp": 1, "bos_token_id": 163584,
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModel": "modeling_deepseek.DeepseekV3Model",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
        },
        "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 11264, "max_position_embeddings": 8192,
        "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
        "num_nextn_predict_layers": 0, "q_lora_rank": None, "rms_norm_eps": 1e-05, "rope_theta": 50000.0,
        "routed_scaling_factor": 2.446, "topk_group": 1, "vocab_size": 163840,
    },
    "qwen3_30b_a3b": COMMON | {
        "model_type": "qwen3_moe", "decoder_sparse_step": 1, "head_dim": 128, "hidden_size": 2048,
        "intermediate_size": 6144, "max_position_embeddings": 40960, "mlp_only_layers": [],
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000.0, "use_sliding_window": False, "vocab_size": 151936,
    },
    "deepseekmath_7b": COMMON | {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096,
        "num_attention_heads": 32, "num_hidden_layers": 30, "num_key_value_heads": 32, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 10000.0, "vocab_size": 102400,
    },
}  # fmt: skip

KIMI_K2: dict[str, Any] = LATENT | {
    "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "bos_token_id": 163584, "eos_token_id": 163585,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModel": "modeling_deepseek.DeepseekV3Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    "first_k_dense_replace": 1, "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432,
    "max_position_embeddings": 131072, "moe_intermediate_size": 2048, "n_group": 1, "n_routed_experts": 384,
    "n_shared_experts": 1, "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "q_lora_rank": 1536, "rms_norm_eps": 1e-06,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
    "rope_scaling": {
        "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "topk_group": 1, "vocab_size": 163840,
}  # fmt: skip
"""Kimi-K2-Instruct."""
QWEN3: dict[str, Any] = COMMON | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "initializer_range": 0.02,
    "max_position_embeddings": 40960, "max_window_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
"""What the dense Qwen3 models have in common."""
QWEN3_SIZES = {
    "qwen3_0_6b": (28, 1024, 16, 3072, True),
    "qwen3_1_7b": (28, 2048, 16, 6144, True),
    "qwen3_4b": (36, 2560, 32, 9728, True),
    "qwen3_8b": (36, 4096, 32, 12288, False),
    "qwen3_14b": (40, 5120, 40, 17408, False),
    "qwen3_32b": (64, 5120, 64, 25600, False),
}
"""Preset -> layers, hidden size, heads, inner size, and whether embeddings are tied."""


def qwen3(preset: str) -> dict[str, Any]:
    """The published config.json of a dense Qwen3 model."""
    keys = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "tie_word_embeddings")
    return QWEN3 | dict(zip(keys, QWEN3_SIZES[preset], strict=True))


GLM_AIR: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "pad_token_id": 151329,
    "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "partial_rotary_factor": 0.5, "initializer_range": 0.02, "intermediate_size": 10944,
    "max_position_embeddings": 131072, "model_type": "glm4_moe", "moe_intermediate_size": 1408, "norm_topk_prob": True,
    "num_attention_heads": 96, "n_group": 1, "topk_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
    "routed_scaling_factor": 1.0, "num_experts_per_tok": 8, "first_k_dense_replace": 1, "num_hidden_layers": 46,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
    "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "use_qk_norm": False, "vocab_size": 151552,
}  # fmt: skip
GLM = GLM_AIR | {
    "first_k_dense_replace": 3, "hidden_size": 5120, "intermediate_size": 12288, "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536, "n_routed_experts": 160, "num_hidden_layers": 92, "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
}  # fmt: skip
"""GLM-4.6."""
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
    "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
    "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768,
    "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
    "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 262144,
}  # fmt: skip
"""Gemma-3-1B-it."""
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
    "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05, "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 201088,
}  # fmt: skip
"""GPT-OSS-20B."""
GPT_OSS_120B = GPT_OSS | {
    "layer_types": ["sliding_attention", "full_attention"] * 18, "num_hidden_layers": 36, "num_local_experts": 128,
}  # fmt: skip


@pytest.mark.parametrize("experiment", PUBLISHED)
def test_a_preset_is_the_released_model(experiment: str) -> None:
    model = composed(f"experiment={experiment}").model
    assert model.vocab_size
    assert differences(PUBLISHED[experiment], model, model.vocab_size) == []


@pytest.mark.parametrize(
    ("experiment", "field", "value"),
    [
        ("r1zero_671b", "routed_scaling_factor", 1.0),
        ("r1zero_671b", "quantization_config", {"quant_method": "fp8"}),
        ("moonlight_16b", "q_lora_rank", 1536),
        ("qwen3_30b_a3b", "vocab_size", 151669),
        ("deepseekmath_7b", "rope_theta", 5e5),
    ],
)
def test_another_model_is_told_apart(experiment: str, field: str, value: Any) -> None:
    model = composed(f"experiment={experiment}").model
    assert model.vocab_size
    (difference,) = differences(PUBLISHED[experiment] | {field: value}, model, model.vocab_size)
    assert difference.startswith(f"{field} is {value}, not ")
