"""Reference implementation in float64: log-softmax and its gradient from their definitions, token losses from
`token_loss.py`.

It is slow, and exact for logits of -inf. The kernels are tested against it; it is itself tested against autograd of
textbook formulas.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kernels.options import LossOptions
from grpo_kernels.token_loss import Tokens, token_losses


@dataclass
class Reference:
    """float64 results: [n] log-probs, entropies, weighted losses, and the [N, V] gradient of the losses' sum."""

    logprob: Tensor
    entropy: Tensor
    loss: Tensor
    gradient: Tensor


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """[n, V] log-softmax in float64; -inf where the logit is -inf, NaN in a row of only -inf."""
    scaled = (logits.double() - logits.double().amax(-1, keepdim=True)) / temperature
    return scaled - scaled.exp().sum(-1, keepdim=True).log()


def entropies(log_p: Tensor) -> Tensor:
    """[n] entropies, -sum p log p, with 0 log 0 = 0."""
    p = log_p.exp()
    return -torch.where(p == 0, 0.0, p * log_p).sum(-1)


def logit_gradient(log_p: Tensor, ids: Tensor, by_logprob: Tensor, by_entropy: Tensor, temperature: float) -> Tensor:
    """[n, V] gradient of sum(by_logprob * logprob + by_entropy * entropy) with respect to the logits:

    (by_logprob * (1[target] - p) - by_entropy * p * (log p + entropy)) / temperature
    """
    p = log_p.exp()
    one_hot = torch.zeros_like(p).scatter(1, ids[:, None], 1.0)
    surprise = torch.where(p == 0, 0.0, p * (log_p + entropies(log_p)[:, None]))
    return (by_logprob[:, None] * (one_hot - p) - by_entropy[:, None] * surprise) / temperature


def grpo_loss(
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
) -> Reference:
    """Float64 results of `fused_grpo_loss` for whole rows, with the same arguments."""
    rows = torch.arange(len(logits)) if rows is None else rows
    log_p = log_softmax(logits[rows], temperature)
    logprob, entropy = log_p.gather(1, ids[:, None])[:, 0], entropies(log_p)
    old, ref, rollout = (
        None if vector is None else vector.double() for vector in (old_logprob, ref_logprob, rollout_logprob)
    )
    tokens = Tokens(advantages.double(), token_weight.double(), old, ref, rollout, cu_seqlens, None, sampled)
    losses = token_losses(logprob, entropy, tokens, options)
    by_entropy = torch.zeros_like(entropy) if losses.grad_entropy is None else losses.grad_entropy
    # Rows that do not count may hold NaN, so their gradients are left out, not multiplied by 0.
    active = losses.weight != 0
    by_logits = logit_gradient(log_p, ids, losses.grad_logprob, by_entropy, temperature)
    gradient = torch.zeros_like(logits, dtype=torch.float64).index_copy(0, rows[active], by_logits[active])
    return Reference(logprob, entropy, losses.loss, gradient)
