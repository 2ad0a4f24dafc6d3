"""Megatron's fused paths that are Transformer Engine's kernels: which of them a model takes, where that is installed.

Not taken: `apply_rope_fusion`, which counts positions along the row, where grouped-query attention rotates in
`PackedAttention` and latent attention gathers its angles by position. Nor `gradient_accumulation_fusion` as a setting:
Megatron's own output layer refuses it without Apex. `add_weight_gradients_in_place` does the same for the layers that
have it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel

from grpo_mega.config.schema import ModelConfig


def fused_options(model: ModelConfig, activation: Any, transformer_engine: bool) -> dict[str, bool]:
    """Megatron's settings of fused paths for a model with this activation.

    Tokens are moved to their experts and back by kernels that know how many rows come out of them, where Megatron's own
    operations make the host wait (`masked_select`); the choice of experts is one kernel; and so is the activation, of
    which Megatron has the two that are named here.
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
    have no gradient and no buffer, and Transformer Engine looks for none.
    """
    modules: Any = gpt.modules()
    for module in modules:
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


def forget_placeholders() -> None:
    """Lets go of the tensors that stand in autograd for gradients that were added in place, one for each shape.

    Transformer Engine keeps them for as long as the process lives, and makes them anew when they are not there.
    """
    kept = sys.modules.get("transformer_engine.pytorch.module.base")
    if kept is not None:
        kept._dummy_wgrads.clear()
