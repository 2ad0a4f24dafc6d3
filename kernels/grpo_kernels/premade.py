"""Attaches gradients computed in the forward pass to their loss."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo_kernels.dispatch import backend


class PremadeGradients(torch.autograd.Function):
    """Autograd function for a scalar loss with precomputed gradients of some tensors.

    `apply(loss, promised, gradients, *tensors)` returns the loss; its backward returns the gradients (None for none)
    times the incoming factor. They are scaled in place, so it can run only once. `promised` is the factor by which they
    and other gradients were multiplied beforehand, or None; another incoming factor is an error.
    """

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, promised: float | None, gradients: tuple[Tensor | None, ...], *tensors: Tensor
    ) -> Tensor:
        """Saves the gradients and returns the loss."""
        ctx.promised, ctx.gradients = promised, gradients
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients times the incoming factor."""
        if ctx.gradients is None:
            raise RuntimeError("the gradients of this loss were made once and are given out; compute the loss again")
        # Not kept, as they are scaled in place: a second backward pass would scale them twice.
        gradients, ctx.gradients = ctx.gradients, None
        if ctx.promised is not None:
            _require_promised(factor, ctx.promised)
        else:
            for gradient in gradients:
                if gradient is not None:
                    _scale_(gradient, factor)
        return None, None, None, *gradients


def _scale_(gradient: Tensor, factor: Tensor) -> None:
    """Computes gradient *= factor; does nothing for the usual factor of 1."""
    # On a GPU the host would have to wait to read the factor, so a kernel reads it.
    if backend(gradient).name != "torch":
        import_module("grpo_kernels.triton_scale").scale_(gradient, factor)
    elif gradient.is_cuda or factor.item() != 1:
        gradient.mul_(factor)


def _require_promised(factor: Tensor, promised: float) -> None:
    message = f"the loss was multiplied by another number than grad_scale={promised}, which main_grad already holds"
    fine = torch.isclose(factor, torch.full_like(factor, promised), rtol=1e-5, atol=0.0)
    if factor.is_cuda:
        torch._assert_async(fine, message)
    elif not fine:
        raise ValueError(f"{message}: {factor.item()}")
