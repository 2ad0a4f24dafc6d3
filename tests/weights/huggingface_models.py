"""Tiny models of every family, what they are tested on, and the transformers models of the same weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from grpo_mega.config.schema import LayoutConfig, Llama3RopeConfig, MLAConfig, ModelConfig, MoEConfig, YarnConfig

VOCAB = 37
"""Below the 64 rows that it is padded to."""
SEQUENCES = [7, 23, 1, 12, 30]
"""Tokens of the sequences that are packed together."""
LR, EPS = 0.1, 1.0
"""Of an update: Adam's first is -LR * gradient / (|gradient| + EPS)."""

QWEN3 = ModelConfig(
    layers=4, hidden=32, heads=4, kv_heads=2, head_dim=12, ffn_hidden=48, context=32, qk_norm=True, init_std=0.2,
    rope_base=1000000,
)  # fmt: skip
EXPERTS = MoEConfig(experts=8, top_k=3, ffn_hidden=16, score="softmax", bias_update_rate=0.0)
DEEPSEEK = replace(
    QWEN3,
    kv_heads=4,
    head_dim=None,
    rope_base=10000,
    attention="mla",
    mla=MLAConfig(q_lora_rank=24, kv_lora_rank=20, qk_head_dim=12, qk_rope_dim=8, v_head_dim=10),
    moe=MoEConfig(experts=8, top_k=4, ffn_hidden=16, shared_ffn_hidden=32, first_dense=1, groups=4, group_top_k=2,
                  scaling=2.5),
)  # fmt: skip
UNGROUPED = replace(DEEPSEEK.moe, groups=0, group_top_k=0, top_k=3)
GLM = replace(QWEN3, qk_norm=False, qkv_bias=True, rope_fraction=0.5, norm_eps=1e-5, moe=UNGROUPED)
# Half of the layers have a window, which is narrower than most sequences, and other positions.
GEMMA3 = replace(
    QWEN3, family="gemma3_text", window=6, full_every=2, window_rope_base=50, rope_base=1000, query_pre_attn_scalar=20,
    tie_embeddings=True,
)  # fmt: skip
# Of six frequencies one stays, two are slowed down and three are in between.
GPT_OSS = replace(
    QWEN3, family="gpt_oss", qk_norm=False, qkv_bias=True, window=6, full_every=2, norm_eps=1e-5, rope_base=100,
    ffn_hidden=16, moe=EXPERTS,
    yarn=YarnConfig(factor=4, original_context=16, beta_fast=1.5, beta_slow=0.2, truncate=False),
)  # fmt: skip
MODELS = {
    "llama": replace(QWEN3, qk_norm=False, norm_eps=1e-5),
    # Of six frequencies one stays, two are slowed down and three are in between.
    "llama3": replace(
        QWEN3,
        qk_norm=False,
        rope_base=100,
        llama3_rope=Llama3RopeConfig(factor=4, original_context=16, low_freq_factor=0.2, high_freq_factor=1.5),
    ),
    "mistral": replace(QWEN3, qk_norm=False, kv_heads=1),
    "ministral": replace(QWEN3, qk_norm=False, head_dim=None, tie_embeddings=True),
    "mistral_window": replace(QWEN3, qk_norm=False, kv_heads=1, window=5),
    "ministral_window": replace(QWEN3, qk_norm=False, window=5, full_every=2),
    "gemma3": GEMMA3,
    "gemma3_apart": replace(GEMMA3, full_every=3, head_dim=8, tie_embeddings=False),
    "gpt_oss": GPT_OSS,
    # Plain positions, another share of full layers, and a head of 16 channels.
    "gpt_oss_plain": replace(GPT_OSS, yarn=YarnConfig(), full_every=0, head_dim=16, tie_embeddings=True),
    "qwen2": replace(QWEN3, qk_norm=False, qkv_bias=True, head_dim=None),
    "qwen2_tied": replace(QWEN3, qk_norm=False, qkv_bias=True, tie_embeddings=True),
    "qwen3": QWEN3,
    "qwen3_tied": replace(QWEN3, tie_embeddings=True),
    "qwen3_moe": replace(QWEN3, moe=EXPERTS),
    "qwen3_moe_first_dense": replace(QWEN3, moe=replace(EXPERTS, first_dense=1)),
    # The toy; GLM-4.5-Air; GLM-4.5, whose heads have norms.
    "glm4_moe": replace(QWEN3, qk_norm=False, moe=DEEPSEEK.moe),
    "glm4_moe_air": GLM,
    "glm4_moe_norms": replace(GLM, qk_norm=True, rope_fraction=1 / 3, moe=DEEPSEEK.moe),
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3_ungrouped": replace(DEEPSEEK, moe=UNGROUPED),
    # Of four frequencies one stays, one is slowed down and two are in between.
    "deepseek_v3_yarn": replace(
        DEEPSEEK,
        rope_base=100,
        yarn=YarnConfig(factor=4, original_context=8, beta_fast=1, beta_slow=0.05, mscale=0.8),
    ),
    "moonlight": replace(
        DEEPSEEK,
        norm_eps=1e-2,  # far from that of the norms within its attention
        mla=replace(DEEPSEEK.mla, q_lora_rank=None),
        moe=replace(UNGROUPED, bias_update_rate=0.0, frozen_bias=True),
    ),
}
WRITTEN_AS: dict[str, dict[str, Any]] = {
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 40},
    "ministral": {"architectures": ["MinistralForCausalLM"], "model_type": "ministral", "sliding_window": 40},
}
"""What the config.json of a model says that is read, and written as another family: the window covers the context."""
WITH_MTP = replace(DEEPSEEK, mtp_layers=1)
BY_EXPERT = ("qwen3_moe", "deepseek_v3")
"""Models of which ranks ask for some experts."""
AHEAD = {"mtp": WITH_MTP, "glm_mtp": replace(GLM, qk_norm=True, mtp_layers=1)}
"""Models with a prediction module."""
IN_FP8 = replace(
    DEEPSEEK,
    hidden=160,
    ffn_hidden=144,
    mla=MLAConfig(q_lora_rank=136, kv_lora_rank=20, qk_head_dim=40, qk_rope_dim=8, v_head_dim=36),
)
"""Several blocks of 128 each way in most weights, which shards cut anywhere."""

IN_MXFP4 = replace(GPT_OSS, hidden=64, ffn_hidden=96, moe=replace(EXPERTS, ffn_hidden=96), dtype="bf16")
"""Two blocks of 32 in a row of one matrix, three in the other's."""

LAYOUTS = {
    "tp2_pp2": LayoutConfig(tp=2, pp=2, sp=True),
    "pp2_vpp2_dp2": LayoutConfig(pp=2, vpp=2),
    "ep2_pp2": LayoutConfig(pp=2, ep=2),
    "tp2_ep4": LayoutConfig(tp=2, sp=True, ep=4),
    "cp2_ep4": LayoutConfig(cp=2, ep=4),
    "tp2_etp2_dp2": LayoutConfig(tp=2, sp=True, etp=2),
}
"""Of four ranks."""
FIRST_LAYOUTS = ("tp2_pp2", "tp2_ep4")
"""Those of `make test`, which split all that can be split but for one expert."""


def released_tensors(model: ModelConfig) -> dict[str, Any]:
    """A GPT-OSS's tensors as a released folder has them, experts in 4 bits, at random."""
    import torch  # jobs choose their device before these are imported

    from grpo_mega.weights import mxfp4
    from grpo_mega.weights.names import entries

    random = torch.Generator().manual_seed(6)
    tensors: dict[str, Any] = {}
    for entry in entries(model, VOCAB):
        if not mxfp4.in_mxfp4(entry):
            tensors.setdefault(entry.name, torch.randn(entry.shape, generator=random).bfloat16())
            continue
        (blocks, numbers), (scales, exponents) = mxfp4.stored_shapes(entry).items()
        if blocks not in tensors:
            tensors[blocks] = torch.randint(256, numbers, generator=random, dtype=torch.uint8)
            tensors[scales] = torch.randint(118, 127, exponents, generator=random, dtype=torch.uint8)
    return tensors
