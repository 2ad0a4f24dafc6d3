"""Tensors of the host on their way to the device."""

from __future__ import annotations

import torch


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on a device. The host does not wait for a GPU: what it still computes need not end before the copy.

    That takes memory that is pinned; torch keeps and reuses it, once the copy is made.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
