"""The small models of this folder's tests, and the platform that they run on."""

from __future__ import annotations

from dataclasses import replace

from grpo_mega.config.schema import MLAConfig, ModelConfig, MoEConfig
from grpo_mega.platform import start

PLATFORM = start()
"""Starting it comes before the test files are collected: they import megatron.core."""
VOCABULARY = 21
DENSE = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn_hidden=48, context=24, init_std=0.2)
MOE = replace(DENSE, moe=MoEConfig(experts=4, ffn_hidden=16, shared_ffn_hidden=16))
LATENT = replace(MOE, kv_heads=4, attention="mla", mla=MLAConfig(v_head_dim=12))
TIED = replace(DENSE, tie_embeddings=True, qk_norm=True)
MODELS = {"dense": DENSE, "moe": MOE, "latent": LATENT, "tied": TIED}
