"""Repairs of megatron-core's latent attention (DeepSeek-V2, section 2.1): an epsilon and a gradient."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms within latent attention, whatever `model.norm_eps` is, as in DeepSeek's own code."""


def set_latent_norms(gpt: GPTModel) -> None:
    """Sets the epsilon of the norms within latent attention; Transformer Engine has them in the up-projections."""
    for module in gpt.modules():
        for part in ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"):
            norm: Any = getattr(module, part, None) if isinstance(module, MultiLatentAttention) else None
            if hasattr(norm, "eps"):
                norm.eps = LATENT_NORM_EPS


def sum_latent_key_gradient(gpt: GPTModel) -> None:
    """Repairs latent attention under tensor parallelism (megatron-core 0.16.1 without Transformer Engine).

    The rotary part of the key is shared by all heads, but each rank back-propagates through its own heads only and
    these gradients are not summed (docs/parity.md, defect 1). A forward hook gathers with an operator whose backward
    sums, and splits the rows again: Megatron's own gather, for sequence parallelism, comes after it, and its backward
    sums as well.
    """
    config = gpt.config
    if not config.multi_latent_attention or config.tensor_model_parallel_size == 1:
        return
    channels = config.kv_lora_rank + config.qk_pos_emb_head_dim

    def gather(_: torch.nn.Module, __: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        combined, bias = output
        # A rank that already has all channels has Transformer Engine's duplicated projection, which is not affected.
        if combined.size(-1) == channels:
            return output
        return scatter_to_sequence_parallel_region(gather_from_tensor_model_parallel_region(combined)), bias

    for name, module in gpt.named_modules():
        if name.endswith("linear_kv_down_proj"):
            module.register_forward_hook(gather)
