"""Weights in fp8 blocks, made as DeepSeek makes them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from grpo_mega.checkpoint.huggingface.fp8 import BLOCK, scale_shape

DTYPE = torch.float8_e4m3fn


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, columns] finite numbers -> the same in E4M3, and the float32 scales of its blocks."""
    rows, columns = weight.shape
    across, down = scale_shape(weight.shape)
    padded = F.pad(weight.float(), (0, down * BLOCK - columns, 0, across * BLOCK - rows))
    blocks = padded.view(across, BLOCK, down, BLOCK)
    largest = blocks.abs().amax((1, 3))
    scale = torch.where(largest > 0, largest / torch.finfo(DTYPE).max, 1.0)
    content = (blocks / scale[:, None, :, None]).to(DTYPE).view(padded.shape)
    return content[:rows, :columns].contiguous(), scale
