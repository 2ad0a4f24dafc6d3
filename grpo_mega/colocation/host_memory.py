"""Memory of the host for what leaves the device: pinned, in pieces of which none is larger than it has to be.

torch rounds pinned memory up to a power of two (its `CachingHostAllocator`), so that 9 GiB take 16. Pieces that are
powers of two themselves lose nothing: what is needed is their sum, and what is kept lies across them.
"""

from __future__ import annotations

import torch

SMALLEST = 1 << 26
"""Bytes of the smallest piece, and thus the most that is lost."""
ALIGNED = 256
"""Whatever is kept begins at a multiple of so many bytes, as on the device."""


def pieces_of(size: int, smallest: int) -> list[int]:
    """Powers of two, largest first and all different, whose sum is `size` rounded up to a multiple of `smallest`."""
    units = -(-size // smallest)
    return [smallest << bit for bit in reversed(range(units.bit_length())) if units >> bit & 1]


def aligned(size: int) -> int:
    """Bytes that something of `size` bytes takes here."""
    return -(-size // ALIGNED) * ALIGNED


class HostMemory:
    """Room on the host that is handed out from its beginning to its end, and is kept from one trip to the next."""

    def __init__(self, pin: bool, smallest: int = SMALLEST) -> None:
        """No room yet; with `pin`, it will be such that a GPU copies to and from it while the host goes on.

        The room is a multiple of `smallest` bytes, a power of two.
        """
        self._pin, self._smallest = pin, smallest
        self._pieces: list[torch.Tensor] = []
        self._used = 0

    def reserve(self, size: int) -> None:
        """Makes room for `size` bytes, of which none is taken; what was kept is lost.

        Pieces that are there already are used again, because pinning is slow; those that are too many are given up.

        Raises:
            RuntimeError: The host has too little memory (torch's error). There is less room than asked for, then.
        """
        wanted = pieces_of(size, self._smallest)
        there = {len(piece): piece for piece in self._pieces}
        self._used, self._pieces = 0, [there[length] for length in wanted if length in there]
        del there  # what is too much is free before there is more
        present = {len(piece) for piece in self._pieces}
        missing = [length for length in wanted if length not in present]
        self._pieces += [torch.empty(length, dtype=torch.uint8, pin_memory=self._pin) for length in missing]

    def take(self, size: int) -> list[torch.Tensor]:
        """The next `size` bytes, as parts of pieces, in order.

        Raises:
            RuntimeError: There is not so much room left.
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
