"""Host memory that is asked for and not written, so that a rehearsal needs less of it than the job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

SMALL = 1 << 20
"""Most bytes that are written."""
aten = torch.ops.aten


class UnwrittenHost(TorchDispatchMode):
    """Context in which nothing is written to large tensors on the host: they are address space, as the GPU's are."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Makes an operation, unless it does no more than write much to the host."""
        named = kwargs or {}
        if function is aten.zeros.default:
            found = aten.empty.memory_format(*args, **named)
            return found if _is_large(found) else found.zero_()
        if function is aten.copy_.default and _is_large(args[0]) and args[1].device.type == "cpu":
            return args[0]
        if function is aten.cat.default and all(map(_is_large, args[0])):
            first, axis = args[0][0], args[1] if len(args) > 1 else 0
            shape = list(first.shape)
            shape[axis] = sum(part.shape[axis] for part in args[0])
            return first.new_empty(shape)
        if function is aten.clone.default and _is_large(args[0]):
            return torch.empty_like(args[0])
        return function(*args, **named)


def _is_large(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.nbytes > SMALL
