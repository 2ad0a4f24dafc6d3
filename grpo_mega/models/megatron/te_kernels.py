"""Kernels of Transformer Engine that a model uses: fused ones, and matrix products in 8 bits.

Two fused kernels are not used. `apply_rope_fusion` counts positions along the row; here grouped-query attention rotates
in `PackedAttention`, and latent attention gathers its angles by position. Megatron's own output layer refuses the
setting `gradient_accumulation_fusion` without Apex; `add_weight_gradients_in_place` does the same for the layers that
support it.

Training in 8 bits follows DeepSeek-V3's recipe (arXiv 2412.19437, section 3.3): e4m3 numbers with one scale for every
1 x 128 of activations and gradients and every 128 x 128 of weights, and products summed in float32. Weights stay bf16
with float32 masters; embedding, output layer, router, norms and attention are not in 8 bits.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel

from grpo_mega.config.schema import LayoutConfig, ModelConfig
from grpo_mega.errors import InputError
from grpo_mega.platform import Platform

ROWS = 128
"""A rank's number of rows is a multiple of this, so that all blocks along the tokens are whole."""
HOPPER = (9, 0)
"""The oldest compute capability for which there are kernels."""


def fused_options(model: ModelConfig, activation: Any, transformer_engine: bool) -> dict[str, bool]:
    """Megatron's settings of fused kernels for a model with this activation.

    Tokens are permuted by kernels that know their number of output rows, where Megatron's own operations make the host
    wait (`masked_select`). The router is one kernel, and so is the activation, if it is one of the two for which
    Megatron has such a kernel.
    """
    experts = transformer_engine and bool(model.moe.experts)
    return dict(
        moe_permute_fusion=experts,
        moe_router_fusion=experts,
        bias_activation_fusion=transformer_engine and activation in (torch.nn.functional.silu, quick_gelu),
    )


def add_weight_gradients_in_place(gpt: GPTModel) -> None:
    """Makes Transformer Engine's matrix products add gradients to Megatron's float32 buffers.

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


def eight_bit_options(layout: LayoutConfig, platform: Platform) -> dict[str, Any]:
    """Megatron's settings for 8 bits; empty without Transformer Engine, as for plans.

    Weights are quantised again for every micro-batch. Cached 8-bit weights would take two more bytes for each weight,
    would not be offloaded with the trainer, and would be out of date after an update unless a pass announces its first
    micro-batch, which generation does not.
    """
    if not (layout.fp8 and platform.transformer_engine):
        return {}
    return dict(fp8="e4m3", fp8_recipe="blockwise", disable_parameter_transpose_cache=True)


def check_eight_bits(layout: LayoutConfig, platform: Platform) -> None:
    """Raises InputError when `layout.fp8` is set and this process cannot compute in 8 bits."""
    if not layout.fp8:
        return
    if not platform.transformer_engine:
        what = "needs Transformer Engine on a GPU, which this process lacks (tools/doctor.py says why)"
        raise InputError("layout.fp8=true", what, "set layout.fp8=false")
    capability = torch.cuda.get_device_capability()
    if capability < HOPPER:
        what = (
            f"needs a GPU of compute capability 9.0 (H100) or newer, and this one has {capability[0]}.{capability[1]}"
        )
        raise InputError("layout.fp8=true", what, "set layout.fp8=false")
