"""fp8 weights as in DeepSeek-V3 (arXiv 2412.19437, section 3.3.2): E4M3, one scale per block of 128 x 128.

A tensor NAME is stored with NAME_scale_inv, the float32 factors of its blocks. The matrices of attention, feed-forward
layers and experts are in fp8; embeddings, the output layer, norms, routers and the projection that joins a prediction
module to the model are not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

BLOCK = 128
SCALE = "_scale_inv"
DTYPE = torch.float8_e4m3fn
# Matches what DeepSeek-V3's release stores in fp8; eh_proj, the router's gate and the embeddings do not match, as their
# names lie outside self_attn and mlp or do not end in _proj.
QUANTISED = re.compile(r"\.(self_attn|mlp)\..*_proj(_with_mqa)?\.weight$")
CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
"""Fields of such a model's `quantization_config` that determine how its weights are stored."""


def is_fp8(quantization_config: Any) -> bool:
    """Whether a `quantization_config` describes these weights."""
    given = quantization_config if isinstance(quantization_config, dict) else {}
    # Only the format may be missing, and then means e4m3; every other field must be present and equal.
    return all(given.get(key, "e4m3" if key == "fmt" else None) == value for key, value in CONFIG.items())


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of a weight [rows, columns]."""
    return tuple(-(-size // BLOCK) for size in shape)


def in_fp8(name: str) -> bool:
    """Whether the tensor of this Hugging Face name is stored in fp8."""
    return QUANTISED.search(name) is not None


def quantised_bucket(bucket: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """(name, whole tensor) pairs as in fp8 files and engines: matrices in fp8, each followed by its scales."""
    stored = []
    for name, tensor in bucket:
        if in_fp8(name):
            content, scale = quantised(tensor)
            stored += [(name, content), (name + SCALE, scale)]
        else:
            stored.append((name, tensor))
    return stored


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises [rows, columns] finite numbers; returns E4M3 numbers and the float32 scales of the blocks.

    The largest number of a block is mapped to the largest of the format, 448; a block of zeros has the scale 1. Memory:
    the weight twice in float32.
    """
    rows, columns = weight.shape
    across, down = scale_shape(weight.shape)
    # Zeros at the edges complete the last blocks; they change neither the maximum of a block nor its scale.
    padded = F.pad(weight.float(), (0, down * BLOCK - columns, 0, across * BLOCK - rows))
    blocks = padded.view(across, BLOCK, down, BLOCK)
    largest = blocks.abs().amax((1, 3))
    scale = torch.where(largest > 0, largest / torch.finfo(DTYPE).max, 1.0)
    content = (blocks / scale[:, None, :, None]).to(DTYPE).view(padded.shape)
    # Contiguous: the slice is a view that would keep the padding in memory, and collectives accept no strided tensors.
    return content[:rows, :columns].contiguous(), scale


def dequantised(content: torch.Tensor, scale: torch.Tensor, part: Sequence[slice]) -> torch.Tensor:
    """Dequantises a `part` of a weight to float32; `content` has its E4M3 numbers, `scale` all scales of the weight."""
    # A part may begin in the middle of a block, so the scale is looked up for each row and column.
    rows, columns = (torch.arange(p.start, p.stop) // BLOCK for p in part)
    return content.float() * scale[rows[:, None], columns]
