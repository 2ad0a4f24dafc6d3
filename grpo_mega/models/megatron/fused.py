"""Chooses the fused kernels of Transformer Engine that a model uses.

Two are not used. `apply_rope_fusion` counts positions along the row; here grouped-query attention rotates in
`PackedAttention`, and latent attention gathers its angles by position. The setting `gradient_accumulation_fusion` is
refused by Megatron's own output layer without Apex; `add_weight_gradients_in_place` does the same for the layers that
support it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel

from grpo_mega.config.schema import ModelConfig


def fused_options(model: ModelConfig, activation: Any, transformer_engine: bool) -> dict[str, bool]:
    """Megatron's settings of fused kernels for a model with this activation.

    Tokens are permuted by kernels that know their number of output rows, where Megatron's own operations make the host
    wait (`masked_select`). The router is one kernel, and so is the activation, which Megatron has for the two that are
    named here.
    """
    experts = transformer_engine and bool(model.moe.experts)
    return dict(
        moe_permute_fusion=experts,
        moe_router_fusion=experts,
        bias_activation_fusion=transformer_engine and activation in (torch.nn.functional.silu, quick_gelu),
    )


def add_weight_gradients_in_place(gpt: GPTModel) -> None:
    """Has Transformer Engine's matrix products add gradients to Megatron's float32 buffers.

    Otherwise every micro-batch's gradient is rounded to the weights' precision, written, read and added. Frozen weights
    have neither gradient nor buffer, and Transformer Engine does not look for one.
    """
    modules: Any = gpt.modules()
    for module in modules:
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


def forget_placeholders() -> None:
    """Frees the placeholders that autograd gets for gradients that were added in place, one for each shape.

    Transformer Engine keeps them as long as the process lives, and makes them again when they are missing.
    """
    kept = sys.modules.get("transformer_engine.pytorch.module.base")
    if kept is not None:
        kept._dummy_wgrads.clear()
