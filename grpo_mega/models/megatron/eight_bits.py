"""Matrix products of training in 8 bits, by Transformer Engine's block recipe.

The recipe is DeepSeek-V3's (arXiv 2412.19437, section 3.3): e4m3 numbers with one scale for every 1 x 128 of
activations and gradients and every 128 x 128 of weights, and products summed in float32. Weights stay bf16 with float32
masters; embedding, output layer, router, norms and attention are not in 8 bits.
"""

from __future__ import annotations

from typing import Any

import torch

from grpo_mega.config.schema import LayoutConfig
from grpo_mega.platform import Platform

ROWS = 128
"""A rank's number of rows is a multiple of this, so that all blocks along the tokens are whole."""
HOPPER = (9, 0)
"""The oldest compute capability for which there are kernels."""


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
    """Raises ValueError when this process cannot compute in 8 bits as `layout.fp8` asks it to."""
    if not layout.fp8:
        return
    if not platform.transformer_engine:
        raise ValueError(
            "layout.fp8=true needs Transformer Engine on a GPU, and this process has none (tools/doctor.py says why); "
            "set layout.fp8=false"
        )
    capability = torch.cuda.get_device_capability()
    if capability < HOPPER:
        raise ValueError(
            f"layout.fp8=true needs a GPU of compute capability 9.0 (H100) or newer, and this one has "
            f"{capability[0]}.{capability[1]}; set layout.fp8=false"
        )
