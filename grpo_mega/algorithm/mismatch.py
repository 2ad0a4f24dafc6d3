"""How far what the engine sampled is from what the trainer scores.

Both put a log-prob on the same tokens with the same weights; kernels, precision or stale weights drive them apart,
and then samples are off-policy without anybody having decided so.
"""

from __future__ import annotations

import torch
from torch import Tensor

EXPLAINED = {"fp32": 1e-4, "bf16": 0.1, "fp8": 0.5}
"""Mean absolute difference of log-probs, in nats, that rounding alone does not reach; by the precision of whichever of
engine and trainer is coarser.

fp32: engines and trainers of small models agree to 1e-5 in every layout (docs/parity.md); ten times as much leaves room
for longer sums and other kernels.

bf16: logits between 16 and 32 are 0.125 apart in it, and the mean error of such a rounding is 0.03; three times as
much, for the trainer and the engine both round, and hidden states too.

fp8 is not measured in an engine yet: rounding weights (`weights.fp8`) moved the log-probs of random Qwen3 models of 4
and 16 layers, whose logits have standard deviations of 0.3 to 1.6, by 0.02 to 0.19, some 14 times as far as rounding to
bf16 did, and an engine rounds activations likewise. This limit reveals wrong names rather than old versions: noise of
30 % of the weights moved the same log-probs by 0.16 to 1.6.
"""


def explained_by_rounding(dtype: str, fp8: bool) -> float:
    """Mean absolute difference between the log-probs of engine and trainer, in nats, that rounding explains.

    Args:
        dtype: What the trainer computes with, "fp32" or "bf16".
        fp8: Whether the engine rounds the weights to 8 bits, which outweighs all other rounding.

    Raises:
        ValueError: `dtype` is neither.
    """
    if dtype not in ("fp32", "bf16"):
        raise ValueError(f"dtype is {dtype!r}; use fp32 or bf16")
    return EXPLAINED["fp8" if fp8 else dtype]


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
