"""Multiplies a gradient by a number that is on the GPU, without accessing the gradient when it is 1."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 1024
BLOCK = 4096


@triton.jit(do_not_specialize=["rows"])
def scale_kernel(values, factor, rows, columns, stride, BLOCK: tl.constexpr):
    """Kernel of values [rows, columns] *= factor [1]."""
    by = tl.load(factor)
    if by != 1.0:
        # The offset of a row exceeds 2^31 in large tensors.
        row = values + tl.program_id(0).to(tl.int64) * stride
        for _ in range(tl.program_id(0), rows, tl.num_programs(0)):
            for start in range(0, columns, BLOCK):
                column = start + tl.arange(0, BLOCK)
                scaled = tl.load(row + column, mask=column < columns).to(tl.float32) * by
                tl.store(row + column, scaled.to(values.dtype.element_ty), mask=column < columns)
            row += tl.num_programs(0).to(tl.int64) * stride


def scale_(values: Tensor, factor: Tensor) -> None:
    """Computes values *= factor; [r, c] with adjacent columns, and a float32 scalar on the same device."""
    rows, columns = values.shape
    if values.numel():
        with torch.cuda.device_of(values):
            scale_kernel[(min(rows, PROGRAMS),)](values, factor, rows, columns, values.stride(0), BLOCK=BLOCK)
