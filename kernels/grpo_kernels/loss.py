"""The GRPO loss of given logits, whose gradient takes the logits' place."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels import checks
from grpo_kernels.dispatch import backend as choose_backend
from grpo_kernels.metrics import Metrics, metrics
from grpo_kernels.options import GRPOLoss
from grpo_kernels.premade import PremadeGradients
from grpo_kernels.rows import logprob_and_entropy
from grpo_kernels.token_loss import Tokens, corrected, token_losses
from grpo_kernels.vocab_parallel import Shard, shard_of


def fused_grpo_loss(
    logits: Tensor,
    ids: Tensor,
    old_logprob: Tensor | None,
    ref_logprob: Tensor | None,
    advantages: Tensor,
    weights: Tensor,
    *,
    options: GRPOLoss,
    temperature: float = 1.0,
    rows: Tensor | None = None,
    rollout_logprob: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Metrics]:
    """sum(weights * loss of the token); `token_loss.py` has the formulas.

    The gradient is known as soon as a row has been read, so it is made here and OVERWRITES THE LOGITS: the caller gives
    them up. Autograd hands that memory out as their gradient, 0 in rows that are not listed or have weight 0 and in
    padding. When no gradient is asked for (no_grad, or logits that require none) they stay as they are.

    The n tokens' vectors are [n] float32; `logits` and the arguments from `temperature` on that are not named here are
    those of `fused_logprob`. Float16 logits have no gradients below 6e-8: scale the weights up.

    Args:
        ids: [n] int64, GLOBAL token ids.
        old_logprob: Log-prob under the policy the update started from; None: the policy itself, ratio exactly 1.
        ref_logprob: Log-prob under the reference policy; None when `options.kl_coef` is 0. With 0 and a reference, the
            KL divergence is measured.
        advantages: A of each token.
        weights: Mask / denominator of each token. A row of weight 0 counts nowhere and may hold anything.
        options: The loss.
        rollout_logprob: Log-prob as the engine sampled the token, for `options.correction`.
        cu_seqlens: [B + 1] int64, 0 and the ends of the sequences among the n tokens, for "gspo" alone.

    Returns:
        The scalar float32 loss, whose `backward` runs once, and metrics.

    Raises:
        ValueError, TypeError: An argument is bad; names it.
    """
    checks.require_logits(logits)
    checks.require_group(group)
    shard = shard_of(logits.shape[1], vocab_size, group)
    checks.require_rows(rows, logits)
    count = len(logits if rows is None else rows)
    checks.require_ids(ids, count, logits.device, shard.vocab_size)
    tokens = Tokens(advantages, weights, old_logprob, ref_logprob, rollout_logprob, cu_seqlens)
    checks.require_tokens(tokens, options, count, logits.device)
    checks.require_temperature(temperature)
    one_launch = _fits_one_launch(shard, tokens, options)
    operations = choose_backend(logits, backend, one_launch).operations
    place = (logits.detach(), ids - shard.start, rows, shard.columns, 1.0 / temperature)
    needed = torch.is_grad_enabled() and logits.requires_grad
    with torch.no_grad():
        if one_launch:
            losses, found = _in_one_launch(operations, place, tokens, options, needed)
        else:
            losses, found = _from_stats(operations, place, shard, tokens, options, needed)
        loss = losses.sum()
    return (PremadeGradients.apply(loss, None, (place[0],), logits) if needed else loss), found


Place = tuple[Tensor, Tensor, Tensor | None, int, float]
"""The first five arguments of every row operation."""


def _fits_one_launch(shard: Shard, tokens: Tokens, options: GRPOLoss) -> bool:
    """Whether a row's loss is known from that row here, and its correction beforehand.

    A token that the correction masks has a log-prob to report all the same.
    """
    corrected_first = options.correction == "none" or (options.correction == "truncate" and tokens.old is not None)
    return shard.ranks == 1 and options.kind != "gspo" and corrected_first


def _in_one_launch(
    operations: Any, place: Place, tokens: Tokens, options: GRPOLoss, needed: bool
) -> tuple[Tensor, Metrics]:
    """[n] losses and metrics; the gradient, when it is needed, is written over the logits."""
    advantage, weight = (tokens.advantage, tokens.weight)
    if tokens.old is not None:
        advantage, weight = corrected(tokens, tokens.old, options)
    outputs = operations.grpo_rows_(*place, tokens.old, tokens.ref, advantage, weight, options, needed, "zero")
    losses, logprob, entropy, kl, clipped = outputs.unbind(-1)
    log_ratio = torch.zeros_like(logprob) if tokens.old is None else logprob - tokens.old
    return losses, metrics(
        given=tokens.weight,
        weight=weight,
        loss=losses,
        logprob=logprob,
        entropy=entropy,
        old=tokens.old,
        log_ratio=log_ratio,
        kl=kl,
        clipped=clipped,
    )


def _from_stats(
    operations: Any, place: Place, shard: Shard, tokens: Tokens, options: GRPOLoss, needed: bool
) -> tuple[Tensor, Metrics]:
    """The same in two passes over the logits, between which ranks and tokens meet."""
    inv_temperature = place[-1]
    stats = shard.merged(operations.row_stats(*place), inv_temperature)
    logprob, entropy = logprob_and_entropy(stats, inv_temperature)
    found = token_losses(logprob, entropy, tokens, options)
    if needed:
        operations.row_gradient_(*place, stats, found.grad_logprob, found.grad_entropy, "zero")
    logged = {name: getattr(found, name) for name in ("loss", "weight", "log_ratio", "kl", "clipped")}
    return found.loss, metrics(given=tokens.weight, logprob=logprob, entropy=entropy, old=tokens.old, **logged)
