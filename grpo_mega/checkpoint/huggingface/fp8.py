"""Weights in 8 bits as DeepSeek-V3 has them (arXiv 2412.19437, section 3.3.2): E4M3, one scale per block of 128 x 128.

A tensor NAME is stored beside NAME_scale_inv, the float32 number that each block is multiplied by when it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

BLOCK = 128
SCALE = "_scale_inv"
CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
"""What a config.json of such a model says under `quantization_config`, and nothing else that matters for weights."""


def is_fp8(quantization_config: Any) -> bool:
    """Whether a config.json means these weights."""
    given = quantization_config if isinstance(quantization_config, dict) else {}
    return all(given.get(key, "e4m3" if key == "fmt" else None) == value for key, value in CONFIG.items())


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of a weight [rows, columns]."""
    return tuple(-(-size // BLOCK) for size in shape)


def dequantised(content: torch.Tensor, scale: torch.Tensor, part: Sequence[slice]) -> torch.Tensor:
    """The `part` of a weight whose E4M3 numbers are `content`, in float32; `scale` is that of the whole weight."""
    rows, columns = (torch.arange(p.start, p.stop) // BLOCK for p in part)
    return content.float() * scale[rows[:, None], columns]
