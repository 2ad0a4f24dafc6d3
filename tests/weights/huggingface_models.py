"""Tiny models of every family, what they are tested on, and the transformers models of the same weights."""

from __future__ import annotations

from dataclasses import replace

from grpo_mega.config.schema import LayoutConfig, MLAConfig, ModelConfig, MoEConfig, YarnConfig

VOCAB = 37
"""Below the 64 rows that it is padded to."""
SEQUENCES = [7, 23, 1, 12, 30]
"""Tokens of the sequences that are packed together."""

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
MODELS = {
    "llama": replace(QWEN3, qk_norm=False, norm_eps=1e-5),
    "qwen3": QWEN3,
    "qwen3_tied": replace(QWEN3, tie_embeddings=True),
    "qwen3_moe": replace(QWEN3, moe=EXPERTS),
    "qwen3_moe_first_dense": replace(QWEN3, moe=replace(EXPERTS, first_dense=1)),
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
WITH_MTP = replace(DEEPSEEK, mtp_layers=1)
IN_FP8 = replace(
    DEEPSEEK,
    hidden=160,
    ffn_hidden=144,
    mla=MLAConfig(q_lora_rank=136, kv_lora_rank=20, qk_head_dim=40, qk_rope_dim=8, v_head_dim=36),
)
"""Several blocks of 128 each way in most weights, which shards cut anywhere."""

LAYOUTS = {
    "tp2_pp2": LayoutConfig(tp=2, pp=2, sp=True),
    "pp2_vpp2_dp2": LayoutConfig(pp=2, vpp=2),
    "ep2_pp2": LayoutConfig(pp=2, ep=2),
    "tp2_ep4": LayoutConfig(tp=2, sp=True, ep=4),
    "cp2_ep4": LayoutConfig(cp=2, ep=4),
    "tp2_etp2_dp2": LayoutConfig(tp=2, sp=True, etp=2),
}
"""Of four ranks."""
