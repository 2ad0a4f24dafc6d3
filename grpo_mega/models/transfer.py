"""Copies between host and device that hardly make the host wait."""

from __future__ import annotations

from collections.abc import Iterable

import torch

STAGED = 1 << 28
"""Bytes of pinned memory that copies to the host pass through; a power of two, as torch would round it up."""


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a tensor to a device asynchronously: the host does not wait for work queued on a GPU.

    This uses pinned memory, which torch keeps and reuses once the copy is done.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@torch.no_grad()
def float_copies(tensors: Iterable[torch.Tensor], staged: int = STAGED) -> list[torch.Tensor]:
    """Copies of tensors as float32 in ordinary memory of the host, which other processes may inherit.

    Copies from a GPU pass through `staged` bytes of pinned memory, and the host waits only when these are full. A copy
    straight to ordinary memory would wait for each tensor, and is several times slower.
    """
    copies: list[torch.Tensor] = []
    stage = PipelineStage(staged // torch.float32.itemsize)
    for tensor in tensors:
        copies.append(torch.empty(tensor.shape, dtype=torch.float32))
        if tensor.device.type == "cpu":
            copies[-1].copy_(tensor)
        else:
            stage.pass_on(tensor.flatten(), copies[-1].flatten())
    stage.arrive()
    return copies


class PipelineStage:
    """Pinned memory through which numbers pass from a GPU to ordinary memory."""

    def __init__(self, size: int) -> None:
        """Allocates room for `size` numbers at the first copy."""
        self._size, self._used = size, 0
        self._memory: torch.Tensor | None = None
        self._under_way: list[tuple[torch.Tensor, torch.Tensor]] = []  # (pinned source, target)

    def pass_on(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Starts to copy [n] numbers to [n] float32 on the host; `arrive` completes the copy."""
        if self._memory is None:
            self._memory = torch.empty(self._size, dtype=torch.float32, pin_memory=source.device.type == "cuda")
        for part, goal in zip(source.split(self._size), target.split(self._size), strict=True):
            if self._used + len(part) > self._size:
                self.arrive()
            here = self._memory[self._used : self._used + len(part)]
            here.copy_(part, non_blocking=True)
            self._under_way.append((here, goal))
            self._used += len(part)

    def arrive(self) -> None:
        """Waits for all numbers, and writes them to their targets."""
        # The copies into pinned memory are asynchronous: it may be read only once they are done.
        if self._under_way and torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        for here, goal in self._under_way:
            goal.copy_(here)
        self._under_way.clear()
        self._used = 0
