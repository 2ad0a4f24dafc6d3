"""The presets are the released models: their config.json, as published, differs in nothing that matters."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_mega.platform import start

start()  # before megatron.core is imported

from grpo_mega.config.load import compose_config  # noqa: E402
from grpo_mega.weights.families import differences  # noqa: E402

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


@pytest.mark.parametrize("experiment", PUBLISHED)
def test_a_preset_is_the_released_model(experiment: str) -> None:
    model = compose_config([f"experiment={experiment}"]).model
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
    model = compose_config([f"experiment={experiment}"]).model
    assert model.vocab_size
    (difference,) = differences(PUBLISHED[experiment] | {field: value}, model, model.vocab_size)
    assert difference.startswith(f"{field} is {value}, not ")
