"""The GRPO loss of given logits, whose gradient overwrites the logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels import checks
from grpo_kernels.dispatch import backend as choose_backend
from grpo_kernels.dispatch import fits_one_launch
from grpo_kernels.logprob import checked_shard
from grpo_kernels.metrics import Metrics, metrics
from grpo_kernels.options import LossOptions
from grpo_kernels.premade import PremadeGradients
from grpo_kernels.rows import logprob_and_entropy
from grpo_kernels.token_loss import RowLosses, Tokens, token_losses
from grpo_kernels.vocab_parallel import Shard


def fused_grpo_loss(
    logits: Tensor,
    ids: Tensor,
    old_logprob: Tensor | None,
    ref_logprob: Tensor | None,
    advantages: Tensor,
    token_weight: Tensor,
    *,
    options: LossOptions,
    temperature: float = 1.0,
    rows: Tensor | None = None,
    rollout_logprob: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sampled: Tensor | None = None,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Metrics]:
    """GRPO loss of given logits, sum(token_weight * loss of the token); `token_loss.py` has the formulas.

    The gradient is computed in the forward pass and OVERWRITES THE LOGITS, which the caller must not use afterwards.
    Autograd returns that memory as their gradient, 0 in padding and in rows that are not listed or have weight 0. With
    no_grad, or logits that require none, they are unchanged. In float16 gradients below 6e-8 are 0: scale weights up.

    The n tokens' vectors are [n] float32; arguments that are not named here are those of `fused_logprob`.

    Args:
        ids: [n] int64, GLOBAL token ids.
        old_logprob: Log-prob under the policy the update started from; None: the policy itself, ratio exactly 1.
        ref_logprob: Log-prob under the reference policy, to measure KL where `options.kl_coef` is 0, or there None.
        advantages: A of each token.
        token_weight: Mask / denominator of each token. A row of weight 0 is ignored and may hold anything.
        options: The loss.
        rollout_logprob: Log-prob as the engine sampled the token, for `options.correction` and its `off_policy_mask`.
        cu_seqlens: [B + 1] int64, 0 and the ends of the sequences among the n tokens, if `options.per_sequence`.
        sampled: [n] bool, tokens in the mean of `options.off_policy_mask`; None: those whose weight is not 0.

    Returns:
        The scalar float32 loss, whose `backward` runs once, and metrics.

    Raises:
        ValueError, TypeError: An argument is bad; names it.
    """
    shard = checked_shard(logits, ids, rows, vocab_size, group)
    tokens = Tokens(advantages, token_weight, old_logprob, ref_logprob, rollout_logprob, cu_seqlens, None, sampled)
    checks.require_tokens(tokens, options, len(ids), logits.device)
    checks.require_temperature(temperature)
    one_launch = fits_one_launch(shard, options)
    operations = choose_backend(logits, backend, one_launch).operations
    row_arguments = (logits.detach(), ids - shard.start, rows, shard.columns, 1.0 / temperature)
    needed = torch.is_grad_enabled() and logits.requires_grad
    with torch.no_grad():
        if one_launch:
            outputs = operations.grpo_rows_(*row_arguments, tokens, options, needed, "zero")
        else:
            outputs = _in_two_launches(operations, row_arguments, shard, tokens, options, needed)
        losses = RowLosses.of(outputs)
        loss = losses.loss.sum()
    attached = PremadeGradients.apply(loss, None, (row_arguments[0],), logits) if needed else loss
    return attached, metrics(losses, tokens)


RowArguments = tuple[Tensor, Tensor, Tensor | None, int, float]
"""The first five arguments of every row operation."""


def _in_two_launches(
    operations: Any, row_arguments: RowArguments, shard: Shard, tokens: Tokens, options: LossOptions, needed: bool
) -> Tensor:
    """[n, 7] `RowLosses` in two passes over the logits, between which ranks and sequences are combined."""
    inv_temperature = row_arguments[-1]
    stats = shard.merged(operations.row_stats(*row_arguments), inv_temperature)
    logprob, entropy = logprob_and_entropy(stats, inv_temperature)
    losses = token_losses(logprob, entropy, tokens, options)
    if needed:
        operations.row_gradient_(*row_arguments, stats, losses.grad_logprob, losses.grad_entropy, "zero")
    return losses.outputs(logprob, entropy)
