"""Host memory that is asked for and not written, so that a rehearsal needs less of it than the job."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

SMALL = 1 << 20
"""Most bytes that are written."""
UNCOUNTED = 0x4000
"""Linux's MAP_NORESERVE: more may be asked for than the machine has."""
aten = torch.ops.aten


class UnwrittenHost(TorchDispatchMode):
    """Context in which nothing is written to large tensors on the host: they are address space, as the GPU's are."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Makes an operation, unless it does no more than write much to the host."""
        named = kwargs or {}
        if function is aten.zeros.default and torch.device(named.get("device") or "cpu").type == "cpu":
            dtype = named.get("dtype") or torch.get_default_dtype()
            if math.prod(args[0]) * dtype.itemsize > SMALL:
                return _room(args[0], dtype)
        if function is aten.copy_.default and _is_large(args[0]) and args[1].device.type == "cpu":
            return args[0]
        if function is aten.cat.default and all(map(_is_large, args[0])):
            first, axis = args[0][0], args[1] if len(args) > 1 else 0
            shape = list(first.shape)
            shape[axis] = sum(part.shape[axis] for part in args[0])
            return _room(shape, first.dtype)
        if function is aten.clone.default and _is_large(args[0]):
            return _room(args[0].shape, args[0].dtype)
        return function(*args, **named)


def _is_large(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.nbytes > SMALL


def _room(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros, whose memory nobody has touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | UNCOUNTED
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=flags)
    return torch.frombuffer(pages, dtype=dtype).view(*shape)
