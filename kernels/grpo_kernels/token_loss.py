"""The loss of each token and its derivatives with respect to log-prob and entropy, in plain torch on [n] vectors.

With ratio rho = exp(logprob - old), advantage A and c = exp(old - rollout) (see `LossOptions.correction`):

    ppo         max(-A rho, -A clip(rho, 1 - low, 1 + high)), at most dual_clip * -A where A < 0; low >= 1 is no bound
    cispo       -stopgrad(clip(rho, 1 - low, 1 + high)) A logprob
    sapo        -A (4 / tau) sigmoid(tau (rho - 1)), with tau = tau_pos where A > 0, else tau_neg
    gspo        ppo with the sequence's rho = exp(mean over its tokens of (logprob - old))
    gspo_token  gspo, in which only a token's own loss moves its log-prob: rho = stopgrad(gspo's rho) pi / stopgrad(pi)
    gmpo        -A exp(mean over the sequence of log min(rho, 1 + high) where A > 0, log max(rho, 1 - low) where A < 0)
    vespo       -stopgrad(rho^k exp(lambda (1 - rho))) A logprob, with the sequence's rho = exp(sum over its tokens of
                (logprob - old)); k and lambda are vespo_k_pos, vespo_lambda_pos, where A < 0 vespo_k_neg and so on
    loss        weight * (policy term * correction + kl_coef * KL(policy || reference) - entropy_coef * entropy)

Where the average of rollout - logprob over the sequence exceeds `off_policy_mask`, negative A count as 0. That average
is over all tokens of the sequence; the means and sums above leave out those that the correction masks.

A log-prob of -inf (the target's logit is -inf) has ratio 0. Its policy term is finite, except under cispo and vespo;
there, and with a KL term, its loss is not, for the caller to refuse. A NaN in an input is a NaN in that token's loss
(in the losses of its sequence where the loss is `per_sequence`), unless its weight is 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels.options import LossOptions

CLIP_LOW, CLIP_HIGH, CLIP_DUAL = 1, 2, 3

SATURATED = 30.0
"""Log-ratio from which a sigmoid of the ratio is 1 and its derivative 0 in float64, at temperatures above 1e-11."""
FARTHEST = 20.0
"""Bound on the log-ratio of a sequence under vespo, as in the paper's code, so that logged values stay finite."""


@dataclass
class Tokens:
    """Inputs of the loss for n tokens, except the policy's; all but two are [n], and all but three float32 for kernels.

    Attributes:
        advantage: The advantage A.
        weight: Factor of the token's loss: mask / denominator. A token of weight 0 is ignored.
        old: Log-prob under the policy before the step's first update; None for the current policy, ratio exactly 1.
        ref: Log-prob under the reference policy; None when the loss has no KL term.
        rollout: Log-prob as the engine sampled it; None when the loss has neither correction nor mask.
        cu_seqlens: [B + 1] ends of the sequences among the n tokens, beginning with 0; for losses that are
            `per_sequence`.
        sequence_group: Ranks that hold tokens of the same B sequences, or None for this rank only; for losses that are
            `per_sequence`.
        sampled: bool, the tokens over which the mean of `off_policy_mask` is taken; None for all whose weight is not 0.
            For callers that give weight 0 to some tokens of a sequence, which must not change this mean.
    """

    advantage: Tensor
    weight: Tensor
    old: Tensor | None = None
    ref: Tensor | None = None
    rollout: Tensor | None = None
    cu_seqlens: Tensor | None = None
    sequence_group: dist.ProcessGroup | None = None
    sampled: Tensor | None = None

    def part(self, tokens: slice) -> Tokens:
        """Some of the tokens, without the sequence data, as a part may cut sequences."""
        old, ref, rollout = (
            vector if vector is None else vector[tokens] for vector in (self.old, self.ref, self.rollout)
        )
        return Tokens(self.advantage[tokens], self.weight[tokens], old, ref, rollout)


@dataclass
class TokenLosses:
    """The results of `token_losses`; all are [n], of the log-probs' dtype but for `clipped`.

    Attributes:
        loss: Weighted loss of each token.
        weight: Weight of the token after the correction.
        grad_logprob: Derivative of the sum of the losses with respect to the token's log-prob.
        grad_entropy: Derivative of that sum with respect to the token's entropy; None when the loss has no entropy
            term.
        log_ratio: Logarithm of the importance ratio (of the sequence under gspo, gspo_token, gmpo and vespo).
        kl: Estimate of KL(policy || reference), 0 without a reference.
        clipped: int64; 0, or CLIP_LOW, CLIP_HIGH or CLIP_DUAL: the bound that the ratio exceeds. Under ppo, gspo,
            gspo_token and gmpo only where that stops the gradient of a token that has one; 0 under sapo and vespo.
    """

    loss: Tensor
    weight: Tensor
    grad_logprob: Tensor
    grad_entropy: Tensor | None
    log_ratio: Tensor
    kl: Tensor
    clipped: Tensor

    def gradients(self, scale: float) -> tuple[Tensor, Tensor | None]:
        """[n] derivatives by log-prob and, if the loss has an entropy term, by entropy, times `scale`."""
        return self.grad_logprob * scale, None if self.grad_entropy is None else self.grad_entropy * scale

    def outputs(self, logprob: Tensor, entropy: Tensor) -> Tensor:
        """[n, 7] `RowLosses`, with the log-probs and entropies that the losses were computed from."""
        columns = RowLosses(self.loss, logprob, entropy, self.kl, self.clipped, self.weight, self.log_ratio)
        return torch.stack([getattr(columns, field.name).to(logprob.dtype) for field in fields(columns)], -1)


@dataclass
class RowLosses:
    """The results for n rows of logits, all [n]; the columns of `rows.grpo_rows_`'s result.

    Attributes:
        loss: Weighted loss.
        logprob: Log-prob of the target.
        entropy: Entropy.
        kl, clipped, weight, log_ratio: As in `TokenLosses`, but `clipped` is a float.
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
        """`RowLosses` from the columns of an [n, 7] tensor."""
        return cls(*outputs.t().contiguous())


def token_losses(logprob: Tensor, entropy: Tensor, tokens: Tokens, options: LossOptions) -> TokenLosses:
    """[n] log-probs and entropies under the policy -> losses and derivatives."""
    old = logprob if tokens.old is None else tokens.old
    # Corrections and masks first: they change which tokens count, and with what weight.
    advantage, weight = _corrected(tokens, old, options)
    active = weight != 0
    advantage = _masked(advantage, logprob, tokens, options)
    # On-policy the ratio is exactly 1 whatever the log-prob is, but a NaN must stay one.
    of_token = log_ratio = torch.where(logprob.isnan(), logprob, 0.0) if tokens.old is None else logprob - old
    # Kinds of a sequence replace the token's ratio by one of the sequence.
    if options.kind in ("gspo", "gspo_token"):
        log_ratio = _sequence_mean(log_ratio, active, tokens)
    if options.kind == "vespo":
        sums, _ = _sequence_sums(log_ratio, active, tokens)
        log_ratio = _of_tokens(sums.clamp(-FARTHEST, FARTHEST), active, tokens)
    if options.kind == "gmpo":
        loss, grad, clipped, log_ratio = _geometric_mean(log_ratio, advantage, weight, tokens, options)
    else:
        loss, grad, clipped = _policy_term(logprob, log_ratio, advantage, options)
        grad = _zero_unless(active, grad * weight)
    # The log-ratio is a mean over the sequence, and every token's log-prob moves it.
    if options.kind == "gspo":
        grad = _sequence_mean(grad, active, tokens)
    kl = torch.zeros_like(logprob)
    if tokens.ref is not None:
        kl, grad_kl = _kl(logprob, tokens.ref, options.kl)
        if options.kl_coef:
            # The factor has a gradient as well: (rho kl)' = rho (kl + kl'), as rho is its own derivative by the
            # log-prob.
            factor = of_token.exp() if options.kl_unbiased else 1.0
            grad_kl = factor * (kl + grad_kl) if options.kl_unbiased else grad_kl
            loss = loss + options.kl_coef * factor * kl
            grad = grad + options.kl_coef * _zero_unless(active, grad_kl * weight)
    if options.entropy_coef:
        loss = loss - options.entropy_coef * entropy
    return TokenLosses(
        loss=_zero_unless(active, loss * weight),
        weight=weight,
        grad_logprob=grad,
        grad_entropy=-options.entropy_coef * weight if options.entropy_coef else None,
        log_ratio=log_ratio,
        kl=kl,
        clipped=_zero_unless(active, clipped),
    )


def _corrected(tokens: Tokens, old: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """[n] advantages and weights after the correction: a factor of the policy term scales the advantage, and a mask is
    a weight of 0. Unchanged without `tokens.rollout`.
    """
    if options.correction == "none" or tokens.rollout is None:
        return tokens.advantage, tokens.weight
    correction, floor, cap = (old - tokens.rollout).exp(), options.correction_floor, options.correction_cap
    if options.correction == "truncate":
        return tokens.advantage * correction.clamp(floor, cap), tokens.weight
    beyond = (correction < floor) | (correction > cap)
    return tokens.advantage * correction.masked_fill(beyond, 0.0), tokens.weight.masked_fill(beyond, 0.0)


def _masked(advantage: Tensor, logprob: Tensor, tokens: Tokens, options: LossOptions) -> Tensor:
    """[n] advantages, 0 where they are negative in a sequence that has become unlikely (`off_policy_mask`).

    The mean is over all tokens of the sequence (DeepSeek-V3.2 divides by its length), including those masked by a
    correction, which are the unlikely ones.
    """
    if options.off_policy_mask is None:
        return advantage
    assert tokens.rollout is not None, "`grpo_kernels.checks` requires it"
    sampled = tokens.weight != 0 if tokens.sampled is None else tokens.sampled
    mean = _sequence_mean(tokens.rollout - logprob, sampled, tokens)
    away = (mean > options.off_policy_mask) & (advantage < 0)
    # A NaN exceeds no threshold: without this it would pass for a sequence that is not masked.
    return torch.where(mean.isnan(), mean, torch.where(away, 0.0, advantage))


def _policy_term(
    logprob: Tensor, log_ratio: Tensor, advantage: Tensor, options: LossOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, its derivative (by the log-prob under cispo and vespo, else by the log-ratio) and clipped bound, all [n].

    Clamping the log-ratio keeps a clipped token from overflowing: the loss is -A exp(clamped log-ratio), which equals
    its derivative where nothing is clamped.
    """
    unclipped = torch.zeros_like(log_ratio, dtype=torch.int64)
    if options.kind == "sapo":
        return *_soft_gate(log_ratio, advantage, options), unclipped
    if options.kind == "vespo":
        factor = -advantage * _gamma(log_ratio, advantage, options)
        return _times_logprob(factor, advantage, logprob), factor, unclipped
    low, high, _ = options.log_bounds
    if options.kind == "cispo":
        factor, trained = -advantage * log_ratio.clamp(low, high).exp(), advantage != 0
        clipped = _codes(trained & (log_ratio < low), trained & (log_ratio > high), None)
        return _times_logprob(factor, advantage, logprob), factor, clipped
    bounded, clipped = _bounded(log_ratio, advantage, options)
    loss = -advantage * bounded.exp()
    return loss, torch.where(clipped == 0, loss, 0.0), clipped


def _times_logprob(factor: Tensor, advantage: Tensor, logprob: Tensor) -> Tensor:
    """[n] factor * logprob, 0 where the factor is 0, even for a log-prob of -inf."""
    return torch.where((advantage == 0) & (logprob == -math.inf), 0.0, factor * logprob)


def _gamma(log_ratio: Tensor, advantage: Tensor, options: LossOptions) -> Tensor:
    """[n] VESPO's factors rho^k exp(lambda (1 - rho)), which have the form of a gamma distribution's density."""
    falls = advantage < 0
    k = torch.full_like(advantage, options.vespo_k_pos).masked_fill(falls, options.vespo_k_neg)
    rate = torch.full_like(advantage, options.vespo_lambda_pos).masked_fill(falls, options.vespo_lambda_neg)
    return (k * log_ratio - rate * torch.expm1(log_ratio)).exp()


def _bounded(log_ratio: Tensor, advantage: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """[n] log-ratios clamped to the bound that can bind, by the sign of A, and the bound that binds."""
    low, high, ceiling = options.log_bounds
    falls, rises = advantage < 0, advantage > 0
    bounded = torch.where(falls, log_ratio.clamp(low, ceiling), log_ratio.clamp(max=high))
    return bounded, _codes(falls & (log_ratio < low), rises & (log_ratio > high), falls & (log_ratio > ceiling))


def _soft_gate(log_ratio: Tensor, advantage: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """SAPO's loss and its derivative by the log-ratio, [n]; both are finite for any ratio."""
    tau = torch.full_like(advantage, options.tau_neg).masked_fill(advantage > 0, options.tau_pos)
    # Without the bound the derivative would be 0 * inf for a large ratio.
    ratio = log_ratio.clamp(max=SATURATED).exp()
    gate = torch.sigmoid(tau * (ratio - 1))
    return -advantage * 4 / tau * gate, -advantage * 4 * gate * torch.sigmoid(tau * (1 - ratio)) * ratio


def _geometric_mean(
    log_ratio: Tensor, advantage: Tensor, weight: Tensor, tokens: Tokens, options: LossOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[n] GMPO's loss, derivative of the sum of weighted losses by the log-prob, clipped bound, log of the mean."""
    active = weight != 0
    bounded, clipped = _bounded(log_ratio, advantage, options)
    mean = _sequence_mean(bounded, active, tokens)
    loss = -advantage * mean.exp()
    of_sequence = _sequence_mean(_zero_unless(active, loss * weight), active, tokens)
    # A token at its bound does not move the mean; all others share its gradient.
    return loss, torch.where(bounded == log_ratio, of_sequence, 0.0), clipped, mean


def _codes(low: Tensor, high: Tensor, dual: Tensor | None) -> Tensor:
    codes = low * CLIP_LOW + high * CLIP_HIGH
    return codes if dual is None else codes + dual * CLIP_DUAL


def _kl(logprob: Tensor, ref: Tensor, estimator: str) -> tuple[Tensor, Tensor]:
    """Estimate of KL(policy || reference) (joschu.net/blog/kl-approx.html) and its derivative by the log-prob."""
    difference = logprob - ref
    if estimator == "k1":
        return difference, torch.ones_like(difference)
    if estimator == "k2":
        return difference.square() / 2, difference
    # exp(-d) - 1 would round away the d^2 / 2 that this estimates when d is small.
    growth = torch.expm1(-difference)
    return growth + difference, -growth


def _sequence_mean(values: Tensor, active: Tensor, tokens: Tokens) -> Tensor:
    """[n] mean over the active tokens of each token's sequence.

    The operation is its own transpose: it maps derivatives by the result to derivatives by the values.
    """
    sums, counts = _sequence_sums(values, active, tokens)
    return _of_tokens(sums / counts.clamp(min=1), active, tokens)


def _sequence_sums(values: Tensor, active: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """[B] sums over the active tokens of each sequence, and their numbers."""
    cu_seqlens = tokens.cu_seqlens
    assert cu_seqlens is not None, "`grpo_kernels.checks` requires it"
    both = (_zero_unless(active, values), active.to(values.dtype))
    sums = torch.stack([torch.segment_reduce(x, "sum", offsets=cu_seqlens, initial=0) for x in both], -1)  # [B, 2]
    if tokens.sequence_group is not None:
        dist.all_reduce(sums, group=tokens.sequence_group)
    return sums[:, 0], sums[:, 1]


def _of_tokens(of_sequences: Tensor, active: Tensor, tokens: Tokens) -> Tensor:
    """[n] value of each active token's sequence, from [B]; 0 for others."""
    assert tokens.cu_seqlens is not None, "`grpo_kernels.checks` requires it"
    lengths = tokens.cu_seqlens.diff()
    return _zero_unless(active, of_sequences.repeat_interleave(lengths, output_size=len(active)))


def _zero_unless(active: Tensor, values: Tensor) -> Tensor:
    """The values of active tokens, 0 for others; unlike a product with 0, this removes NaN."""
    return torch.where(active, values, 0)
