"""4-bit weights, as of GPT-OSS's experts: MXFP4 (OCP Microscaling Formats, 1.0, section 5).

A tensor NAME [experts, columns, rows] is stored as NAME_blocks [experts, rows, blocks, 16], two numbers in each byte,
the lower four bits first, and NAME_scales [experts, rows, blocks], the exponent of two, plus 127, of each block of 32
columns. The format is only read: exports have unquantised numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from grpo_mega.weights.names import NamedTensor, Region

BLOCK = 32
"""Number of columns that share a scale."""
BLOCKS, SCALES = "_blocks", "_scales"
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the lower three of four bits (E2M1); the highest bit is the sign."""


def in_mxfp4(entry: NamedTensor) -> bool:
    """Whether mxfp4 files store this tensor quantised: the matrices of the experts."""
    return entry.place is not None and len(entry.shape) == 3


def stored_shapes(entry: NamedTensor) -> dict[str, tuple[int, ...]]:
    """{name in the files: shape} of the stored tensors of a quantised tensor."""
    experts, columns, rows = entry.shape
    blocks = -(-columns // BLOCK)
    return {entry.name + BLOCKS: (experts, rows, blocks, BLOCK // 2), entry.name + SCALES: (experts, rows, blocks)}


def dequantised(stored: Callable[[str, Region], torch.Tensor], name: str, target: Region) -> torch.Tensor:
    """Dequantises the slice `target` of a tensor to float32, which can represent every number of the format.

    `stored` reads a slice of a tensor in the files.
    """
    experts, columns, rows = target
    # Whole blocks are read, which may begin before and end after the requested columns; the surplus is cut off at the
    # end.
    of_rows = (experts, rows, slice(columns.start // BLOCK, -(-columns.stop // BLOCK)))
    pairs = stored(name + BLOCKS, (*of_rows, slice(0, BLOCK // 2)))
    # Converted before the subtraction, which would wrap around in uint8.
    exponents = stored(name + SCALES, of_rows).to(torch.int32) - 127
    of_bits = torch.tensor([*VALUES, *(-value for value in VALUES)])
    numbers = of_bits[torch.stack([pairs & 15, pairs >> 4], -1).int()].flatten(-2)
    numbers = torch.ldexp(numbers, exponents[..., None]).flatten(-2)
    first = columns.start % BLOCK
    return numbers[..., first : first + columns.stop - columns.start].transpose(1, 2)
