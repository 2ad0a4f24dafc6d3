"""The GRPO objective, token by token: clipped importance ratio times advantage, and KL to the reference policy.

Losses are to be minimised. A NaN in any input is a NaN in that token's loss; nothing here hides one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def kl_estimate(logprob: Tensor, ref_logprob: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) from tokens the policy sampled.

    Schulman, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html), with l = logprob and r = ref_logprob:

    - "k1": l - r, unbiased, high variance; as a loss term its gradient is 0 in expectation;
    - "k2": (l - r)^2 / 2, biased, low variance;
    - "k3": exp(r - l) - (r - l) - 1, unbiased, never negative (DeepSeekMath, equation 4).

    Args:
        logprob: [T] natural-log probability of each token under the policy.
        ref_logprob: [T] the same under the reference policy.
        estimator: "k1", "k2" or "k3".

    Returns:
        [T], differentiable in both arguments.

    Raises:
        ValueError: The shapes differ or `estimator` is unknown.
    """
    _require_same_shape(logprob=logprob, ref_logprob=ref_logprob)
    difference = logprob - ref_logprob
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":  # expm1: exp(-d) - 1 would round away the d^2 / 2 this estimates when d is small
        return torch.expm1(-difference) + difference
    raise ValueError(f"kl_estimator is {estimator!r}; use k1, k2 or k3")


def clipped_policy_loss(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[Tensor, Tensor]:
    """PPO-clip (arXiv 1707.06347, equation 7) with separate bounds (DAPO) and optional dual clip (arXiv 1912.09729).

    With ratio = exp(logprob - old_logprob) and A = advantage:

        loss = max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high))
        loss = min(loss, dual_clip * -A)        where A < 0, with a dual clip

    The sign of A decides which bound can bind, so it is computed as -A * exp(clamped log-ratio) with the upper bound
    for A >= 0, the lower bound and the dual clip for A < 0. Clamping the logarithm keeps the gradient finite when the
    ratio overflows and the clip is active.

    Args:
        logprob: [T] under the policy that is trained; the loss is differentiable in it.
        old_logprob: [T] under the policy the update started from.
        advantage: [T].
        clip_low: The ratio is clipped from below at 1 - clip_low, in [0, 1).
        clip_high: The ratio is clipped from above at 1 + clip_high.
        dual_clip: Upper bound c > 1 on loss / -A for negative advantages, or None.

    Returns:
        The loss [T], and [T] bool: whether the clip stops the gradient of a token that has one.

    Raises:
        ValueError: The shapes differ or a bound is out of range.
    """
    _require_same_shape(logprob=logprob, old_logprob=old_logprob, advantage=advantage)
    _require_bounds(clip_low, clip_high, dual_clip)
    log_ratio = logprob - old_logprob
    falling = log_ratio.clamp(min=math.log1p(-clip_low), max=math.inf if dual_clip is None else math.log(dual_clip))
    rising = log_ratio.clamp(max=math.log1p(clip_high))
    bounded = torch.where(advantage < 0, falling, rising)
    return -advantage * bounded.exp(), (bounded != log_ratio) & (advantage != 0)


def grpo_token_loss(
    logprob: Tensor,
    old_logprob: Tensor,
    ref_logprob: Tensor,
    advantage: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    kl_coef: float,
    kl_estimator: str,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The GRPO loss of every token (DeepSeekMath, equation 3, before averaging) and what to log about it.

    All tensors are [T]; see `clipped_policy_loss` and `kl_estimate` for the other arguments. With `kl_coef` 0 the
    reference is not read.

    Returns:
        The loss [T] = clipped policy loss + kl_coef * KL estimate, and detached [T] metrics:
        "ratio", the importance ratio; "clip_fraction", 1.0 where the clip stops the gradient, else 0.0;
        "approx_kl_old", the k3 estimate of KL(old || policy), whose samples the old policy drew;
        "kl", the estimate that is in the loss, only when `kl_coef` is not 0.

    Raises:
        ValueError: The shapes differ, a bound is out of range or `kl_estimator` is unknown.
    """
    loss, clipped = clipped_policy_loss(logprob, old_logprob, advantage, clip_low, clip_high, dual_clip)
    metrics = {
        "ratio": (logprob.detach() - old_logprob.detach()).exp(),
        "clip_fraction": clipped.to(loss.dtype),
        "approx_kl_old": kl_estimate(old_logprob.detach(), logprob.detach(), "k3"),
    }
    if kl_coef != 0:
        kl = kl_estimate(logprob, ref_logprob, kl_estimator)
        loss = loss + kl_coef * kl
        metrics["kl"] = kl.detach()
    return loss, metrics


def _require_same_shape(**vectors: Tensor) -> None:
    """Refuses vectors that would broadcast against each other."""
    shapes = {name: list(vector.shape) for name, vector in vectors.items()}
    if len(set(map(tuple, shapes.values()))) > 1:
        raise ValueError(f"one value per token is needed from each of these, all of one shape: {shapes}")


def _require_bounds(clip_low: float, clip_high: float, dual_clip: float | None) -> None:
    if not 0 <= clip_low < 1:
        raise ValueError(f"clip_low is {clip_low}; the lower bound 1 - clip_low must be in (0, 1]")
    if not clip_high >= 0:
        raise ValueError(f"clip_high is {clip_high}; use a number that is not negative")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip is {dual_clip}; use a number above 1, or null for none")
