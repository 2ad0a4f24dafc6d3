"""How far what the engine sampled is from what the trainer scores.

Both put a log-prob on the same tokens with the same weights; kernels, precision or stale weights drive them apart,
and then samples are off-policy without anybody having decided so.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rollout_mismatch(logprob: Tensor, rollout_logprob: Tensor) -> dict[str, float]:
    """Summary of the differences over n trained tokens, computed in float64. NaN in, NaN out.

    Args:
        logprob: [n] as the trainer scores the tokens.
        rollout_logprob: [n] as the engine sampled them.

    Returns:
        With d = logprob - rollout_logprob and w = exp(d): "mean_abs", "max_abs", "p50_abs", "p90_abs" and "p99_abs"
        (nearest rank) of |d|, "mean_ratio" of w, and "effective_sample_size" = (sum w)^2 / (n * sum w^2), 1 when the
        two agree and 1 / n when one token outweighs all others, however far apart they are. Empty when n is 0.

    Raises:
        ValueError: The arguments are not vectors of one length.
    """
    if logprob.shape != rollout_logprob.shape or logprob.dim() != 1:
        shapes = f"{list(logprob.shape)} and {list(rollout_logprob.shape)}"
        raise ValueError(f"logprob and rollout_logprob must be vectors of one length, got {shapes}")
    n = len(logprob)
    if n == 0:
        return {}
    difference = logprob.detach().double() - rollout_logprob.detach().double()
    distance, ratio = difference.abs(), difference.exp()
    values = {
        "mean_abs": distance.mean(),
        "max_abs": distance.max(),
        **{f"p{p}_abs": _percentile(distance, p) for p in (50, 90, 99)},
        "mean_ratio": ratio.mean(),
        "effective_sample_size": _effective_sample_size(difference),
    }
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))


def _effective_sample_size(log_ratio: Tensor) -> Tensor:
    """(sum w)^2 / (n * sum w^2) of w = exp(log_ratio), with all w divided by the largest: that changes nothing, and no
    overflow of w, or of its square, makes it NaN."""
    relative = (log_ratio - log_ratio.max()).exp()
    ratio = torch.where(log_ratio == torch.inf, 1.0, relative)
    return ratio.sum().square() / (len(ratio) * ratio.square().sum())


def _percentile(values: Tensor, percent: int) -> Tensor:
    """Nearest rank. torch.quantile refuses more than 2^24 values, and kthvalue takes NaN for the largest of numbers."""
    kth = values.kthvalue(-(-percent * len(values) // 100)).values
    return torch.where(values.isnan().any(), torch.nan, kth)
