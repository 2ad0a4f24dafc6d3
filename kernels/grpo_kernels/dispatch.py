"""Chooses the implementation of the row operations, with the reason: cuda, else triton, else torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.options import LossOptions
from grpo_kernels.vocab_parallel import Shard

MODULES = {"torch": "grpo_kernels.rows", "triton": "grpo_kernels.triton_rows", "cuda": "grpo_kernels.cuda_rows"}


@dataclass(frozen=True)
class Backend:
    """An implementation of the row operations, and the reason for choosing it.

    Attributes:
        name: "torch", "triton" or "cuda".
        why: The reason, as text.
    """

    name: str
    why: str

    @property
    def operations(self) -> Any:
        """The module with `row_stats`, `row_gradient_` and `grpo_rows_`."""
        # Imported late, because triton may not be installed.
        return import_module(MODULES[self.name])


def backend(
    logits: Tensor, override: str | None = None, one_launch: bool = False, gradient: torch.dtype | None = None
) -> Backend:
    """Chooses the implementation for logits (or the output weight) like these.

    Args:
        logits: Any tensor on the device in question.
        override: The name of an implementation to use; None for the best available.
        one_launch: Whether loss and gradient are computed in one launch, the operation with a CUDA kernel; others under
            "cuda" use Triton.
        gradient: With `one_launch`, dtype of the gradient; None for that of the logits.

    Raises:
        ValueError: `override` is not an implementation.
    """
    if override is not None:
        if override not in MODULES:
            raise ValueError(
                f"backend is {override!r}; use one of {', '.join(MODULES)}, or None for the best available"
            )
        return Backend(override, "asked for")
    if not logits.is_cuda:
        return Backend("torch", f"{logits.device.type} tensors: the kernels need a GPU")
    if find_spec("triton") is None:
        return Backend("torch", "triton is not installed")
    if not one_launch:
        return Backend("triton", "a GPU with triton")
    why_not = import_module(MODULES["cuda"]).why_not(logits.device, logits.dtype, logits.shape[-1], gradient)
    return Backend("triton", f"not cuda: {why_not}") if why_not else Backend("cuda", "rows stay in shared memory")


def fits_one_launch(shard: Shard, options: LossOptions) -> bool:
    """Whether a token's loss depends only on its local row of logits: a whole row, no effect of the sequence."""
    return shard.ranks == 1 and not options.per_sequence
