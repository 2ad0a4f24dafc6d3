"""Host memory for offloaded tensors: pinned, in pieces sized to avoid waste.

torch rounds pinned memory up to a power of two (its `CachingHostAllocator`), so that 9 GiB take 16. Pieces that are
powers of two lose nothing: they sum to the required size, and tensors may span pieces.
"""

from __future__ import annotations

import torch

SMALLEST = 1 << 26
"""Size of the smallest piece in bytes, and so the largest waste."""
ALIGNED = 256
"""Alignment in bytes of every stored tensor, as on the device."""


def pieces_of(size: int, smallest: int) -> list[int]:
    """Powers of two, largest first and all different, whose sum is `size` rounded up to a multiple of `smallest`."""
    units = -(-size // smallest)
    return [smallest << bit for bit in reversed(range(units.bit_length())) if units >> bit & 1]


def aligned(size: int) -> int:
    """`size` bytes rounded up to the alignment."""
    return -(-size // ALIGNED) * ALIGNED


class HostMemory:
    """Host memory allocated from beginning to end, and kept between offloads."""

    def __init__(self, pin: bool, smallest: int = SMALLEST) -> None:
        """Starts empty; with `pin`, memory will be pinned, so that a GPU copies to and from it asynchronously.

        The total is a multiple of `smallest` bytes, a power of two.
        """
        self._pin, self._smallest = pin, smallest
        self._pieces: list[torch.Tensor] = []
        self._used = 0

    def reserve(self, size: int) -> None:
        """Provides `size` free bytes; the previous content is lost.

        Existing pieces are reused, because pinning is slow; superfluous ones are given back to torch, which keeps
        pinned memory for later.

        Raises:
            RuntimeError: The host has too little memory (torch's error). The memory is then smaller than requested.
        """
        wanted = pieces_of(size, self._smallest)
        there = {len(piece): piece for piece in self._pieces}
        self._used, self._pieces = 0, [there[length] for length in wanted if length in there]
        del there  # gives superfluous pieces back before it allocates more
        present = {len(piece) for piece in self._pieces}
        missing = [length for length in wanted if length not in present]
        self._pieces += [torch.empty(length, dtype=torch.uint8, pin_memory=self._pin) for length in missing]

    def take(self, size: int) -> list[torch.Tensor]:
        """Allocates the next `size` bytes, as parts of pieces, in order.

        Raises:
            RuntimeError: Fewer than `size` bytes are left.
        """
        begin, parts = self._used, []
        self._used += aligned(size)
        end, offset = begin + size, 0
        for piece in self._pieces:
            low, high = max(begin - offset, 0), min(end - offset, len(piece))
            if low < high:
                parts.append(piece[low:high])
            offset += len(piece)
        if end > offset:
            raise RuntimeError(f"{size:,} bytes were asked for, and {offset - begin:,} of {offset:,} are left")
        return parts
