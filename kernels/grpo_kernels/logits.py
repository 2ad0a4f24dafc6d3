"""Logits for sampling, equal to those from which the linear functions compute log-probs."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels import checks
from grpo_kernels.chunked import Operands


@torch.no_grad()
def linear_logits(hidden: Tensor, output_weight: Tensor) -> Tensor:
    """[n, H] hidden states, [V, H] output weight -> [n, V] float32 logits, products summed in float32. No gradient.

    Raises:
        ValueError, TypeError: An argument is bad; names it.
    """
    checks.require_linear(hidden, output_weight)
    return Operands.of(hidden, output_weight).logits(slice(None), torch.float32)
