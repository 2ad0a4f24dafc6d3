"""The same numbers in float64, written down from their definitions; slow, and exact for logits of -inf.

What the kernels are tested against. Loops over tokens, and takes nothing from the other modules but the options.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from grpo_kernels.options import GRPOLoss


@dataclass
class Reference:
    """float64 results: [n] log-probs, entropies, weighted losses, and the [N, V] gradient of the losses' sum."""

    logprob: Tensor
    entropy: Tensor
    loss: Tensor
    gradient: Tensor


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """[n, V] float64; -inf where the logit is, NaN in a row of -inf alone."""
    scaled = (logits.double() - logits.double().amax(-1, keepdim=True)) / temperature
    return scaled - scaled.exp().sum(-1, keepdim=True).log()


def entropies(log_p: Tensor) -> Tensor:
    """[n] of -sum p log p, with 0 log 0 = 0."""
    p = log_p.exp()
    return -torch.where(p == 0, 0.0, p * log_p).sum(-1)


def logit_gradient(log_p: Tensor, ids: Tensor, by_logprob: Tensor, by_entropy: Tensor, temperature: float) -> Tensor:
    """[n, V] gradient of sum(by_logprob * logprob + by_entropy * entropy) with respect to the logits:

    (by_logprob * (1[target] - p) - by_entropy * p * (log p + entropy)) / temperature
    """
    p = log_p.exp()
    one_hot = torch.zeros_like(p).scatter_(1, ids[:, None], 1.0)
    surprise = torch.where(p == 0, 0.0, p * (log_p + entropies(log_p)[:, None]))
    return (by_logprob[:, None] * (one_hot - p) - by_entropy[:, None] * surprise) / temperature


def grpo_loss(
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
) -> Reference:
    """What `fused_grpo_loss` computes, of whole rows; its arguments mean the same."""
    rows = torch.arange(len(logits)) if rows is None else rows
    log_p = log_softmax(logits[rows], temperature)
    logprob, entropy = log_p.gather(1, ids[:, None])[:, 0], entropies(log_p)
    old = logprob if old_logprob is None else old_logprob.double()
    weight, factor = _correction(old, rollout_logprob, weights.double(), options)
    log_ratio = logprob - old
    loss, by_logprob, by_entropy = (torch.zeros_like(logprob) for _ in range(3))
    for tokens in _ratio_shared_by(weight, options, cu_seqlens):
        ratio = 1.0 if old_logprob is None else log_ratio[tokens].mean().exp().item()
        for i in tokens:
            term, by_log_ratio = _policy_term(
                ratio, logprob[i].item(), advantages[i].item() * factor[i].item(), options
            )
            loss[i] += weight[i] * term
            for j in tokens:
                by_logprob[j] += weight[i] * by_log_ratio / len(tokens)
    for i in weight.nonzero()[:, 0].tolist():
        if options.kl_coef:
            assert ref_logprob is not None
            estimate, derivative = _kl(logprob[i].item() - ref_logprob[i].item(), options.kl)
            loss[i] += weight[i] * options.kl_coef * estimate
            by_logprob[i] += weight[i] * options.kl_coef * derivative
        loss[i] -= weight[i] * options.entropy_coef * entropy[i] if options.entropy_coef else 0.0
        by_entropy[i] = -weight[i] * options.entropy_coef
    gradient = torch.zeros_like(logits, dtype=torch.float64)
    counted = weight != 0
    gradient[rows[counted]] = logit_gradient(log_p, ids, by_logprob, by_entropy, temperature)[counted]
    return Reference(logprob, entropy, loss, gradient)


def _ratio_shared_by(weight: Tensor, options: GRPOLoss, cu_seqlens: Tensor | None) -> list[list[int]]:
    """The tokens that count, in lists of those that have one importance ratio in common."""
    counted = weight.nonzero()[:, 0].tolist()
    if options.kind != "gspo":
        return [[i] for i in counted]
    assert cu_seqlens is not None
    sequences = ([i for i in counted if start <= i < end] for start, end in pairwise(cu_seqlens.tolist()))
    return [sequence for sequence in sequences if sequence]


def _policy_term(ratio: float, logprob: float, advantage: float, options: GRPOLoss) -> tuple[float, float]:
    """Loss of one token and its derivative, with respect to the log-prob under cispo and to the log-ratio else."""
    clipped = min(max(ratio, 1 - options.clip_low), 1 + options.clip_high)
    if options.kind == "cispo":
        return (-clipped * advantage * logprob if advantage else 0.0), -clipped * advantage
    if advantage == 0:
        return 0.0, 0.0
    plain, bound = -advantage * ratio, -advantage * clipped
    loss, derivative = (plain, plain) if plain >= bound else (bound, 0.0)
    if options.dual_clip is not None and advantage < 0 and loss > -advantage * options.dual_clip:
        return -advantage * options.dual_clip, 0.0
    return loss, derivative


def _kl(difference: float, estimator: str) -> tuple[float, float]:
    """Estimate of KL(policy || reference) and its derivative, of log-prob - reference log-prob."""
    if estimator == "k1":
        return difference, 1.0
    if estimator == "k2":
        return difference**2 / 2, difference
    growth = torch.tensor(-difference, dtype=torch.float64).expm1().item()
    return growth + difference, -growth


def _correction(old: Tensor, rollout: Tensor | None, weight: Tensor, options: GRPOLoss) -> tuple[Tensor, Tensor]:
    """[n] weights and [n] factors of the advantages."""
    if options.correction == "none":
        return weight, torch.ones_like(weight)
    assert rollout is not None
    correction = (old - rollout.double()).exp()
    if options.correction == "truncate":
        return weight, correction.clamp(max=options.correction_cap)
    kept = correction <= options.correction_cap
    return torch.where(kept, weight, 0.0), torch.where(kept, correction, 0.0)
