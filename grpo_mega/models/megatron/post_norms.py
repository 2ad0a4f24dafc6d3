"""Norms after attention and feed-forward, and scaled embeddings, which Megatron lacks (Gemma team, 2025, Gemma 3)."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer

from grpo_mega.models.megatron.layers import RMSNorm


def use_post_norms(gpt: GPTModel) -> None:
    """Gives the last projection of attention and of feed-forward in every layer a `post_norm` of its output.

    Every tensor parallel rank has the complete output, with sequence parallelism that of its own rows, as for the norms
    before a layer.
    """
    for layer in gpt.modules():
        if isinstance(layer, TransformerLayer):
            for projection in (layer.self_attention.linear_proj, layer.mlp.linear_fc2):
                projection.post_norm = RMSNorm(gpt.config, gpt.config.hidden_size, gpt.config.layernorm_epsilon)
                projection.register_forward_hook(_normed)


def _normed(projection: Any, _: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    return projection.post_norm(output[0]), output[1]


def scale_embedding(gpt: GPTModel) -> None:
    """Multiplies the embeddings by sqrt(hidden), rounded to their precision as in the released code."""
    if gpt.pre_process:
        factor = torch.tensor(gpt.config.hidden_size**0.5).to(gpt.config.params_dtype).item()
        gpt.embedding.register_forward_hook(lambda _, __, embedded: embedded * factor)
