"""Metrics of a loss: a few float32 numbers, reduced on the device without a synchronization."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kernels.token_loss import CLIP_DUAL, CLIP_HIGH, CLIP_LOW, RowLosses, Tokens


@dataclass(frozen=True)
class Metrics:
    """Metrics of this rank's tokens whose corrected weight is not 0; all but the last three are 0-dimensional.

    Attributes:
        tokens: Number of these tokens. With 0 the means are 0, the minimum is inf and the maximum -inf.
        clip_low, clip_high, clip_dual: Fraction whose ratio is beyond that bound (`TokenLosses.clipped`).
        kl: Mean estimate of KL(policy || reference), in the loss or not; 0 without a reference.
        kl_old: Mean k3 estimate of KL(old || policy), from samples of the old policy.
        entropy: Mean.
        ratio, ratio_min, ratio_max: Mean and extremes of the importance ratio (`TokenLosses.log_ratio`).
        loss: [n] weighted loss of every token, for finding one that is not finite.
        logprob: [n] log-prob of every token; 0 where the weight, before the correction, is 0.
        entropies: [n] entropy at every token; 0 where the weight, before the correction, is 0.
    """

    tokens: Tensor
    clip_low: Tensor
    clip_high: Tensor
    clip_dual: Tensor
    kl: Tensor
    kl_old: Tensor
    entropy: Tensor
    ratio: Tensor
    ratio_min: Tensor
    ratio_max: Tensor
    loss: Tensor
    logprob: Tensor
    entropies: Tensor


def metrics(losses: RowLosses, tokens: Tokens) -> Metrics:
    """Metrics of all rows, from their losses and inputs."""
    logprob, old, active = losses.logprob, tokens.old, losses.weight != 0
    count = active.sum().float()
    difference = torch.zeros_like(logprob) if old is None else logprob - old
    ratio = losses.log_ratio.exp()

    def mean(values: Tensor) -> Tensor:
        # `where`, because a token that does not count may hold NaN.
        return (torch.where(active, values, 0.0).sum(dtype=torch.float64) / count.clamp(min=1)).float()

    return Metrics(
        tokens=count,
        clip_low=mean((losses.clipped == CLIP_LOW).float()),
        clip_high=mean((losses.clipped == CLIP_HIGH).float()),
        clip_dual=mean((losses.clipped == CLIP_DUAL).float()),
        kl=mean(losses.kl),
        kl_old=mean(torch.expm1(difference) - difference),
        entropy=mean(losses.entropy),
        ratio=mean(ratio),
        ratio_min=-_largest(torch.where(active, -ratio, -torch.inf)),
        ratio_max=_largest(torch.where(active, ratio, -torch.inf)),
        loss=losses.loss,
        logprob=torch.where(tokens.weight != 0, logprob, 0.0),
        entropies=torch.where(tokens.weight != 0, losses.entropy, 0.0),
    )


def _largest(values: Tensor) -> Tensor:
    """The largest value; -inf when there is none."""
    return torch.cat([values, values.new_full((1,), -torch.inf)]).amax()
