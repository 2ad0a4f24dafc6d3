"""Weights in the format of SGLang's `update_weights_from_tensor`: bytes and the layout of the tensors in them."""

from __future__ import annotations

import math
from typing import Any

Described = list[tuple[str, tuple[int, ...], str]]
"""Name, shape and dtype of each tensor, in the order of their bytes."""


class _SharedTensor:
    """A tensor in another process's memory; pickles as that tensor, without opening it in this process.

    It must not be opened here, because torch refuses to share a CUDA tensor that came from another process.
    """

    def __init__(self, rebuild: Any, arguments: tuple[Any, ...]) -> None:
        self._reduced = rebuild, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._reduced


def bucket(part: Any) -> Any:
    """A [bytes] uint8 tensor for one rank of the engine, from bytes or from the result of `reduce_tensor`."""
    import torch

    # SGLang expects a payload for each of its ranks, even for one to which the trainer sends nothing.
    if not part:
        return torch.empty(0, dtype=torch.uint8)
    # Bytes are copied into a bytearray because torch has no read-only tensors.
    return torch.frombuffer(bytearray(part), dtype=torch.uint8) if isinstance(part, bytes) else _SharedTensor(*part)


def metadata(tensors: Described) -> list[Any]:
    """SGLang's description of a bucket: name, shape, dtype and byte offsets of each tensor in it."""
    import torch
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    entries, end = [], 0
    for name, shape, dtype_name in tensors:
        dtype = getattr(torch, dtype_name)
        size = math.prod(shape) * dtype.itemsize
        entries.append(FlattenedTensorMetadata(name, torch.Size(shape), dtype, end, end + size, size))
        end += size
    return entries
