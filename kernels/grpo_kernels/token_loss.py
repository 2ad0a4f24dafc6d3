"""The loss of each token and its derivatives with respect to log-prob and entropy, in plain torch on [n] vectors.

With ratio rho = exp(logprob - old), advantage A and c = exp(old - rollout) (see `GRPOLoss.correction`):

    ppo     max(-A rho, -A clip(rho, 1 - low, 1 + high)), at most dual_clip * -A where A < 0; low >= 1 bounds nothing
    gspo    the same with the sequence's rho = exp(mean over its tokens of (logprob - old))
    cispo   -stopgrad(clip(rho, 1 - low, 1 + high)) A logprob
    loss    weight * (policy term * correction + kl_coef * KL(policy || reference) - entropy_coef * entropy)

A log-prob of -inf (the target's logit is -inf) has ratio 0. Under ppo and gspo its policy term is finite; under cispo,
and with a KL term, its loss is not, for the caller to refuse. A NaN in an input is a NaN in that token's loss (in
the losses of its sequence under gspo), unless its weight is 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels.options import GRPOLoss

CLIP_LOW, CLIP_HIGH, CLIP_DUAL = 1, 2, 3


@dataclass
class Tokens:
    """What is known about the n tokens before the policy is asked; all but the last two are [n], float32 for kernels.

    Attributes:
        advantage: The advantage A.
        weight: Factor of the token's loss: mask / denominator. A token of weight 0 counts nowhere.
        old: Log-prob under the policy the update started from; None: the policy itself, ratio exactly 1.
        ref: Log-prob under the reference policy; None when the loss has no KL term.
        rollout: Log-prob as the engine sampled it; None when the loss has no correction.
        cu_seqlens: [B + 1] ends of the sequences among the n tokens, beginning with 0; for gspo.
        sequence_group: The ranks that hold tokens of the same B sequences, or None for this one alone; for gspo.
    """

    advantage: Tensor
    weight: Tensor
    old: Tensor | None = None
    ref: Tensor | None = None
    rollout: Tensor | None = None
    cu_seqlens: Tensor | None = None
    sequence_group: dist.ProcessGroup | None = None

    def part(self, tokens: slice) -> Tokens:
        """Some of the tokens; sequences are not cut, so what is said of them is dropped."""
        old, ref, rollout = (
            vector if vector is None else vector[tokens] for vector in (self.old, self.ref, self.rollout)
        )
        return Tokens(self.advantage[tokens], self.weight[tokens], old, ref, rollout)


@dataclass
class TokenLosses:
    """What `token_losses` finds; all are [n], of the log-probs' dtype but for `clipped`.

    Attributes:
        loss: Weighted loss of each token.
        weight: Its weight after the correction.
        grad_logprob: Derivative of the sum of the losses with respect to the token's log-prob.
        grad_entropy: The same for its entropy; None when the loss has no entropy term.
        log_ratio: Logarithm of the importance ratio (of the sequence under gspo).
        kl: Estimate of KL(policy || reference), 0 without a reference.
        clipped: int64; 0, or CLIP_LOW, CLIP_HIGH or CLIP_DUAL: which bound the ratio is beyond. Under ppo and gspo only
            where that stops the gradient of a token that has one.
    """

    loss: Tensor
    weight: Tensor
    grad_logprob: Tensor
    grad_entropy: Tensor | None
    log_ratio: Tensor
    kl: Tensor
    clipped: Tensor

    def gradients(self, scale: float) -> tuple[Tensor, Tensor | None]:
        """[n] derivatives with respect to log-prob and, where the loss has an entropy term, entropy, times `scale`."""
        return self.grad_logprob * scale, None if self.grad_entropy is None else self.grad_entropy * scale

    def outputs(self, logprob: Tensor, entropy: Tensor) -> Tensor:
        """[n, 7] of `RowLosses`, with the log-probs and entropies that the losses were made of."""
        columns = RowLosses(self.loss, logprob, entropy, self.kl, self.clipped, self.weight, self.log_ratio)
        return torch.stack([getattr(columns, field.name).to(logprob.dtype) for field in fields(columns)], -1)


@dataclass
class RowLosses:
    """What is known about n rows of logits once their loss is made, all [n]; the columns of `rows.grpo_rows_`'s result.

    Attributes:
        loss: Weighted loss.
        logprob: Log-prob of the target.
        entropy: Entropy.
        kl, clipped, weight, log_ratio: As in `TokenLosses`, but that `clipped` is a float.
    """

    loss: Tensor
    logprob: Tensor
    entropy: Tensor
    kl: Tensor
    clipped: Tensor
    weight: Tensor
    log_ratio: Tensor

    @classmethod
    def of(cls, outputs: Tensor) -> RowLosses:
        """From [n, 7]."""
        return cls(*outputs.t().contiguous())


def token_losses(logprob: Tensor, entropy: Tensor, tokens: Tokens, options: GRPOLoss) -> TokenLosses:
    """[n] log-probs and entropies under the policy -> losses and derivatives."""
    old = logprob if tokens.old is None else tokens.old
    advantage, weight = _corrected(tokens, old, options)
    counted = weight != 0
    log_ratio = torch.where(logprob.isnan(), logprob, 0.0) if tokens.old is None else logprob - old
    if options.kind == "gspo":
        log_ratio = _sequence_mean(log_ratio, counted, tokens)
    loss, grad, clipped = _policy_term(logprob, log_ratio, advantage, options)
    grad = _zero_unless(counted, grad * weight)
    if options.kind == "gspo":
        grad = _sequence_mean(grad, counted, tokens)
    kl = torch.zeros_like(logprob)
    if tokens.ref is not None:
        kl, grad_kl = _kl(logprob, tokens.ref, options.kl)
        if options.kl_coef:
            loss = loss + options.kl_coef * kl
            grad = grad + options.kl_coef * _zero_unless(counted, grad_kl * weight)
    if options.entropy_coef:
        loss = loss - options.entropy_coef * entropy
    return TokenLosses(
        loss=_zero_unless(counted, loss * weight),
        weight=weight,
        grad_logprob=grad,
        grad_entropy=-options.entropy_coef * weight if options.entropy_coef else None,
        log_ratio=log_ratio,
        kl=kl,
        clipped=_zero_unless(counted, clipped),
    )


def _corrected(tokens: Tokens, old: Tensor, options: GRPOLoss) -> tuple[Tensor, Tensor]:
    """[n] advantages and weights after the correction: every policy term is linear in the size of its advantage, and a
    mask is a weight of 0. Without `tokens.rollout` they are as they were.
    """
    if options.correction == "none" or tokens.rollout is None:
        return tokens.advantage, tokens.weight
    correction, cap = (old - tokens.rollout).exp(), options.correction_cap
    if options.correction == "truncate":
        return tokens.advantage * correction.clamp(max=cap), tokens.weight
    beyond = correction > cap
    return tokens.advantage * correction.masked_fill(beyond, 0.0), tokens.weight.masked_fill(beyond, 0.0)


def _policy_term(
    logprob: Tensor, log_ratio: Tensor, advantage: Tensor, options: GRPOLoss
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, its derivative (in the log-prob under cispo, in the log-ratio else) and what is clipped, all [n].

    The sign of A decides which bound can bind, and clamping the logarithm keeps an overflowing ratio out of a clipped
    token: the loss is -A exp(clamped log-ratio), its own derivative where nothing is clamped.
    """
    low, high, ceiling = options.log_bounds
    if options.kind == "cispo":
        factor = -advantage * log_ratio.clamp(low, high).exp()
        loss = torch.where((advantage == 0) & (logprob == -math.inf), 0.0, factor * logprob)  # 0 * -inf is no loss
        trained = advantage != 0
        return loss, factor, _codes(trained & (log_ratio < low), trained & (log_ratio > high), None)
    falls, rises = advantage < 0, advantage > 0
    bounded = torch.where(falls, log_ratio.clamp(low, ceiling), log_ratio.clamp(max=high))
    loss = -advantage * bounded.exp()
    clipped = _codes(falls & (log_ratio < low), rises & (log_ratio > high), falls & (log_ratio > ceiling))
    return loss, torch.where(clipped == 0, loss, 0.0), clipped


def _codes(low: Tensor, high: Tensor, dual: Tensor | None) -> Tensor:
    codes = low * CLIP_LOW + high * CLIP_HIGH
    return codes if dual is None else codes + dual * CLIP_DUAL


def _kl(logprob: Tensor, ref: Tensor, estimator: str) -> tuple[Tensor, Tensor]:
    """Estimate of KL(policy || reference) (joschu.net/blog/kl-approx.html) and its derivative in the log-prob."""
    difference = logprob - ref
    if estimator == "k1":
        return difference, torch.ones_like(difference)
    if estimator == "k2":
        return difference.square() / 2, difference
    growth = torch.expm1(-difference)  # exp(-d) - 1 would round away the d^2 / 2 this estimates when d is small
    return growth + difference, -growth


def _sequence_mean(values: Tensor, counted: Tensor, tokens: Tokens) -> Tensor:
    """[n] sum over the counted tokens of each token's sequence, divided by their number.

    It is its own transpose: derivatives with respect to the result become those with respect to the values.
    """
    cu_seqlens = tokens.cu_seqlens
    assert cu_seqlens is not None, "checks.py asks for it"
    both = (_zero_unless(counted, values), counted.to(values.dtype))
    sums = torch.stack([torch.segment_reduce(x, "sum", offsets=cu_seqlens, initial=0) for x in both], -1)  # [B, 2]
    if tokens.sequence_group is not None:
        dist.all_reduce(sums, group=tokens.sequence_group)
    means = sums[:, 0] / sums[:, 1].clamp(min=1)
    return _zero_unless(counted, means.repeat_interleave(cu_seqlens.diff(), output_size=len(values)))


def _zero_unless(counted: Tensor, values: Tensor) -> Tensor:
    """Unlike a product with 0, it keeps out NaN."""
    return torch.where(counted, values, 0)
