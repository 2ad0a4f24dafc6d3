"""Chooses what computes attention on a GPU, for training, the planner and the rules alike."""

from __future__ import annotations

from grpo_mega.config.schema import LayoutConfig, ModelConfig

MOST_CHANNELS = 256
"""Largest number of channels of a head in FlashAttention-2."""


def attention_on_gpu(layout: LayoutConfig, model: ModelConfig) -> str:
    """`layout.attention` on a GPU, where auto means torch's kernel if that can compute the model."""
    if layout.attention == "auto":
        return "padded" if why_padded(model) else "torch"
    return layout.attention


def why_padded(model: ModelConfig) -> str | None:
    """Why kernels for sequences of any length cannot compute this model; None when they can."""
    if model.dtype != "bf16":
        return f"model.dtype={model.dtype}: the kernels compute in bf16"
    if (channels := key_channels(model)) > MOST_CHANNELS:
        return f"heads have {channels} channels: the kernels take {MOST_CHANNELS}"
    return None


def key_channels(model: ModelConfig) -> int:
    """Channels of a head's queries and keys."""
    if model.attention == "mla":
        return model.mla.qk_head_dim + model.mla.qk_rope_dim
    return model.head_dim or model.hidden // model.heads
