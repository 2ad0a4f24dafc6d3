"""Copies of host tensors to the device."""

from __future__ import annotations

import torch


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a tensor to a device asynchronously: the host does not wait for work queued on a GPU.

    This uses pinned memory, which torch keeps and reuses once the copy is done.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
