"""Passes over the chunks of an output layer's logits: losses with their gradients, in one or two launches per chunk.

A chunk's logits exist only within one function call, so that never two chunks' logits exist at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.chunked import Gradients, Operands, OutputLayer
from grpo_kernels.options import LossOptions
from grpo_kernels.premade import PremadeGradients
from grpo_kernels.rows import logprob_and_entropy
from grpo_kernels.token_loss import RowLosses, Tokens

PerToken = dict[str, Tensor]
Derivatives = tuple[Tensor, Tensor, Tensor | None, PerToken]
"""(losses, their derivatives by the log-probs, by the entropies or None, further outputs), all [r]."""
DerivativesOf = Callable[[Tensor, Tensor, slice], Derivatives]
"""(log-probs [r], entropies [r], slice of the n rows) -> losses and derivatives."""


@dataclass(frozen=True)
class Work:
    """Rows of a call, and the gradients to accumulate.

    Attributes:
        layer: The output layer.
        operands: Operands of the products that give the logits.
        ids: [n] int64, the targets' local columns.
        gradients: Accumulated gradients; None when none is needed.
        grad_scale: Factor of the gradients, not of the losses.
    """

    layer: OutputLayer
    operands: Operands
    ids: Tensor
    gradients: Gradients | None
    grad_scale: float

    @classmethod
    def of(
        cls,
        layer: OutputLayer,
        hidden: Tensor,
        output_weight: Tensor,
        ids: Tensor,
        main_grad: Tensor | None = None,
        grad_scale: float = 1.0,
    ) -> Work:
        """The work of a linear function, from its arguments; gathers other ranks' rows if `layer` requires it."""
        operands = layer.operands(hidden, output_weight)
        gradients = None
        if torch.is_grad_enabled() and (hidden.requires_grad or output_weight.requires_grad):
            gradients = Gradients.wanted(operands, hidden, output_weight, main_grad)
        # The backward pass never sees `main_grad`, so its part must have the factor of the loss beforehand; the
        # gradient of `hidden` then gets it here as well, and the backward pass multiplies nothing.
        scale = 1.0 if main_grad is None else float(grad_scale)
        return cls(layer, operands, ids - layer.shard.start, gradients, scale)

    def parts(self) -> list[slice]:
        """Slices of the rows of each chunk."""
        return list(self.layer.chunks(len(self.ids)))

    def row_arguments(self, part: slice) -> tuple[Tensor, Tensor, None, int, float]:
        """First five arguments of every row operation for some rows, whose logits are computed here."""
        logits = self.operands.logits(part, self.layer.logits_dtype)
        return logits, self.ids[part], None, self.layer.shard.columns, self.layer.inv_temperature

    def attached(self, loss: Tensor, hidden: Tensor, output_weight: Tensor, main_grad: Tensor | None) -> Tensor:
        """The loss [] with the computed gradients of the two tensors attached."""
        if self.gradients is None:
            return loss
        # A gradient that is in `main_grad` already must not reach autograd as well.
        by_weight, promised = (self.gradients.output_weight, None) if main_grad is None else (None, self.grad_scale)
        ready = (self.layer.reduced(self.gradients.hidden), by_weight)
        return PremadeGradients.apply(loss, promised, ready, hidden, output_weight)


def one_launch(work: Work, operations: Any, tokens: Tokens, options: LossOptions) -> Tensor:
    """[n, 7] `RowLosses`; every chunk's losses and gradients come from one launch of `operations.grpo_rows_`."""
    return torch.cat([_one_launch(work, operations, tokens.part(part), options, part) for part in work.parts()])


def _one_launch(work: Work, operations: Any, tokens: Tokens, options: LossOptions, part: slice) -> Tensor:
    row_arguments = work.row_arguments(part)
    if work.gradients is None:
        return operations.grpo_rows_(*row_arguments, tokens, options, False, "leave")
    gradient = work.operands.gradient_for(row_arguments[0])
    outputs = operations.grpo_rows_(*row_arguments, tokens, options, True, "leave", gradient, work.grad_scale)
    work.gradients.add(work.operands, part, gradient, RowLosses.of(outputs).weight != 0)
    return outputs


def two_launches(work: Work, derivatives_of: DerivativesOf) -> tuple[Tensor, PerToken]:
    """[n] losses and further outputs; between a chunk's statistics and its gradient, ranks are combined and any
    function of log-probs and entropies is applied.
    """
    operations = work.layer.operations(work.operands)
    chunks = [_two_launches(work, operations, derivatives_of, part) for part in work.parts()]
    extras = {name: torch.cat([extra[name] for _, extra in chunks]) for name in chunks[0][1]}
    return torch.cat([losses for losses, _ in chunks]), extras


def _two_launches(work: Work, operations: Any, derivatives_of: DerivativesOf, part: slice) -> tuple[Tensor, PerToken]:
    row_arguments = work.row_arguments(part)
    stats = work.layer.shard.merged(operations.row_stats(*row_arguments), work.layer.inv_temperature)
    logprob, entropy = logprob_and_entropy(stats, work.layer.inv_temperature)
    losses, by_logprob, by_entropy, extras = derivatives_of(logprob, entropy, part)
    _add_gradient(work, operations, row_arguments, part, stats, by_logprob, by_entropy)
    return losses, extras


def statistics(work: Work) -> Tensor:
    """[n, 4] statistics (`rows.row_stats`) of all whole rows: only the first of two launches."""
    operations = work.layer.operations(work.operands)
    # The statistics of all chunks are merged together: one exchange between ranks instead of one for each chunk.
    parts = [operations.row_stats(*work.row_arguments(part)) for part in work.parts()]
    return work.layer.shard.merged(torch.cat(parts), work.layer.inv_temperature)


def add_gradients(work: Work, stats: Tensor, by_logprob: Tensor, by_entropy: Tensor | None) -> None:
    """Runs the second launch, from statistics [n, 4] and the derivatives [n] by log-probs and entropies."""
    if work.gradients is None:
        return
    # The logits of each chunk are computed again: those of the first launch, for all chunks, would be [n, vocabulary].
    operations = work.layer.operations(work.operands)
    for part in work.parts():
        of_part = (stats[part], by_logprob[part], None if by_entropy is None else by_entropy[part])
        _add_gradient(work, operations, work.row_arguments(part), part, *of_part)


def _add_gradient(
    work: Work,
    operations: Any,
    row_arguments: tuple[Tensor, Tensor, None, int, float],
    part: slice,
    stats: Tensor,
    by_logprob: Tensor,
    by_entropy: Tensor | None,
) -> None:
    if work.gradients is None:
        return
    gradient = work.operands.gradient_for(row_arguments[0])
    by_logprob = by_logprob * work.grad_scale
    by_entropy = None if by_entropy is None else by_entropy * work.grad_scale
    operations.row_gradient_(*row_arguments, stats, by_logprob, by_entropy, "leave", out=gradient)
    active = by_logprob != 0 if by_entropy is None else (by_logprob != 0) | (by_entropy != 0)
    work.gradients.add(work.operands, part, gradient, active)
