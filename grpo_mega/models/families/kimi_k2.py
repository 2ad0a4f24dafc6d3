"""Kimi-K2, text: DeepSeek-V3's layers with 384 experts in no groups, half of its heads, and no prediction modules."""

from dataclasses import replace

from grpo_mega.models.families.deepseek import DEEPSEEK_V3

KIMI_K2 = replace(
    DEEPSEEK_V3,
    name="kimi_k2",
    assumed={**DEEPSEEK_V3.assumed, "n_group": 1, "topk_group": 1, "rope_theta": 50000.0},
    same_as="deepseek_v3",
)
