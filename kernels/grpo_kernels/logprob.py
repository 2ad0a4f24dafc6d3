"""Differentiable log-probs and entropies of given logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo_kernels import checks
from grpo_kernels.dispatch import backend as choose_backend
from grpo_kernels.rows import logprob_and_entropy
from grpo_kernels.vocab_parallel import Shard, shard_of


def fused_logprob(
    logits: Tensor,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    rows: Tensor | None = None,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature)[ids] and the entropy of softmax(logits / temperature).

    The logits are read once. For the backward pass, the logits themselves and four floats per row are saved; it writes
    a gradient of the same size, 0 in rows that are not listed and in padding.

    Args:
        logits: [N, >= V] float32, bfloat16 or float16; this rank's vocabulary shard if `group` is given.
        ids: [n] int64, GLOBAL token ids.
        temperature: Divisor of the logits.
        rows: [n] int64, rows of `logits` to use, each once; None for all N.
        vocab_size: Number of real tokens of all ranks together; columns after them are padding, which is never read.
            None for no padding. All ranks have the same number of columns, in rank order.
        group: Tensor parallel ranks that share the vocabulary, or None. All must call this with the same rows, and get
            the same bits.
        backend: "cuda", "triton" or "torch"; None: see `dispatch.backend`.

    Returns:
        [n] log-probs and [n] entropies, float32, natural logarithms, both differentiable in the logits. A target whose
        logit is -inf has log-prob -inf; a row of only -inf has NaN.

    Raises:
        ValueError, TypeError: An argument is bad; names it.
    """
    shard = checked_shard(logits, ids, rows, vocab_size, group)
    checks.require_temperature(temperature)
    operations = choose_backend(logits, backend).operations
    return _LogProb.apply(logits, ids - shard.start, rows, shard, 1.0 / temperature, operations)


def checked_shard(
    logits: Tensor, ids: Tensor, rows: Tensor | None, vocab_size: int | None, group: dist.ProcessGroup | None
) -> Shard:
    """This rank's shard of the vocabulary of the logits; raises when one of these arguments is bad."""
    checks.require_logits(logits)
    checks.require_group(group)
    shard = shard_of(logits.shape[1], vocab_size, group)
    checks.require_rows(rows, logits)
    checks.require_ids(ids, len(logits if rows is None else rows), logits.device, shard.vocab_size)
    return shard


class _LogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        ids: Tensor,
        rows: Tensor | None,
        shard: Shard,
        inv_temperature: float,
        operations: Any,
    ) -> tuple[Tensor, Tensor]:
        stats = operations.row_stats(logits, ids, rows, shard.columns, inv_temperature)
        stats = shard.merged(stats, inv_temperature)
        ctx.save_for_backward(logits, ids, rows, stats)
        ctx.shard, ctx.inv_temperature, ctx.operations = shard, inv_temperature, operations
        ctx.set_materialize_grads(False)
        return logprob_and_entropy(stats, inv_temperature)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, ids, rows, stats = ctx.saved_tensors
        # Autograd passes None for an output that nothing depends on.
        if grad_logprob is None:
            grad_logprob = torch.zeros_like(stats[:, 0])
        # In new memory: unlike those of a loss, these logits still belong to the caller.
        grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
        gradients = (grad_logprob.contiguous(), None if grad_entropy is None else grad_entropy.contiguous())
        ctx.operations.row_gradient_(
            logits, ids, rows, ctx.shard.columns, ctx.inv_temperature, stats, *gradients, "zero", out=grad
        )
        return grad, None, None, None, None, None
