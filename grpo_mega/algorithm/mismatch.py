"""Mismatch between engine and trainer: the difference of their log-probs of the same tokens.

Both compute a log-prob of the same tokens with the same weights. Different kernels, precisions or stale weights make
them differ, and then samples are unintentionally off-policy.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

EXPLAINED = {"fp32": 1e-4, "bf16": 0.1, "fp8": 0.5}
"""Upper bound on the mean absolute difference of log-probs, in nats, that rounding causes, for the lower of the
precisions of engine and trainer.

fp32: engines and trainers of small models agree to 1e-5 in every layout (docs/parity.md); ten times as much allows for
longer sums and other kernels.

bf16: its spacing between 16 and 32, where logits can be, is 0.125, and the mean error of such a rounding is 0.03; three
times as much, because trainer and engine both round, and hidden states are rounded too.

fp8 is not measured in an engine yet: rounding weights (`weights.fp8`) changed the log-probs of random Qwen3 models of 4
and 16 layers, whose logits have standard deviations of 0.3 to 1.6, by 0.02 to 0.19, some 14 times as much as rounding
to bf16, and an engine rounds activations as well. This limit detects wrong names rather than old versions: noise of
30 % of the weights changed the same log-probs by 0.16 to 1.6."""


def explained_by_rounding(dtype: str, fp8: bool) -> float:
    """Mean absolute difference between the log-probs of engine and trainer, in nats, that rounding explains.

    Args:
        dtype: The trainer's precision, "fp32" or "bf16".
        fp8: Whether the engine rounds the weights to 8 bits, which outweighs all other rounding.

    Raises:
        ValueError: `dtype` is neither.
    """
    if dtype not in ("fp32", "bf16"):
        raise ValueError(f"dtype is {dtype!r}; use fp32 or bf16")
    return EXPLAINED["fp8" if fp8 else dtype]


def rollout_mismatch(
    logprob: Tensor, rollout_logprob: Tensor, group: dist.ProcessGroup | None = None
) -> dict[str, float]:
    """Statistics of the differences over n trained tokens, computed in float64. NaN in, NaN out.

    Args:
        logprob: [n] the trainer's log-probs.
        rollout_logprob: [n] the engine's log-probs of the same tokens.
        group: Group of ranks with different tokens, possibly none, for one summary of all; for CPU tensors, and all
            ranks must call this. None for a summary of this rank's tokens.

    Returns:
        With d = logprob - rollout_logprob and w = exp(d): "mean_abs", "max_abs", "p50_abs", "p90_abs" and "p99_abs"
        (nearest rank) of |d|, "mean_ratio" of w, and "effective_sample_size" = (sum w)^2 / (n * sum w^2), 1 when the
        two agree and 1 / n when one token outweighs all others, however far apart they are. Empty when n is 0 on all
        ranks.

    Raises:
        ValueError: The arguments are not vectors of one length.
    """
    if logprob.shape != rollout_logprob.shape or logprob.dim() != 1:
        shapes = f"{list(logprob.shape)} and {list(rollout_logprob.shape)}"
        raise ValueError(f"logprob and rollout_logprob must be vectors of one length, got {shapes}")
    difference = logprob.detach().double() - rollout_logprob.detach().double()
    distance = difference.abs()
    sums = torch.stack(
        [distance.new_tensor(len(distance)), distance.isnan().sum(), distance.sum(), difference.exp().sum()]
    )
    # Every rank learns the same n and the same number of NaNs, so all return early or none does, and no collective
    # below waits for a rank that has left.
    n, nans, distances, ratios = _over(group, dist.ReduceOp.SUM, sums.double()).tolist()
    if n == 0:
        return {}
    # Concatenated because a rank without tokens has no maximum, yet must take part in the reduction.
    lowest = difference.new_full((1,), -torch.inf)
    highest = torch.stack([torch.cat([x, lowest]).max() for x in (difference, distance)])
    # `nans` has counted any NaN; here it is replaced, so that nothing depends on how a backend compares NaN.
    largest, max_abs = _over(group, dist.ReduceOp.MAX, highest.nan_to_num(0.0, torch.inf, -torch.inf)).tolist()
    values = {
        "mean_abs": distances / n,
        "max_abs": max_abs,
        **{f"p{p}_abs": _nearest_rank(distance, -(-p * int(n) // 100), group) for p in (50, 90, 99)},
        "mean_ratio": ratios / n,
        "effective_sample_size": _effective_sample_size(difference, largest, n, group),
    }
    return dict.fromkeys(values, math.nan) if nans else values


def _over(group: dist.ProcessGroup | None, operation: Any, values: Tensor) -> Tensor:
    """Values reduced element by element over the ranks of the group; unchanged without a group."""
    if group is not None:
        dist.all_reduce(values, operation, group=group)
    return values


def _effective_sample_size(log_ratio: Tensor, largest: float, n: float, group: dist.ProcessGroup | None) -> float:
    """(sum w)^2 / (n * sum w^2) of w = exp(log_ratio).

    All w are divided by the largest first, which does not change the result, so that neither w nor its square
    overflows.
    """
    relative = (log_ratio - largest).exp()
    # Where the largest log-ratio is infinite, inf - inf would be NaN; such a w equals the largest.
    ratio = torch.where(log_ratio == torch.inf, 1.0, relative)
    total, squares = _over(group, dist.ReduceOp.SUM, torch.stack([ratio.sum(), ratio.square().sum()])).tolist()
    return total**2 / (n * squares) if squares else math.nan


def _nearest_rank(values: Tensor, k: int, group: dist.ProcessGroup | None) -> float:
    """k-th smallest of all ranks' non-negative float64 numbers, without gathering them.

    Such numbers are ordered like their bits read as integers. Four histograms, of 16 bits each, determine it.
    """
    candidates, bits = values.view(torch.int64), 0
    for shift in (48, 32, 16, 0):
        digits = (candidates >> shift) & 0xFFFF
        up_to = _over(group, dist.ReduceOp.SUM, digits.bincount(minlength=1 << 16)).cumsum(0)
        digit = int(torch.searchsorted(up_to, k))
        # The k-th smallest of all becomes the k-th smallest of those that share the bits found so far.
        k -= int(up_to[digit - 1]) if digit else 0
        candidates, bits = candidates[digits == digit], bits << 16 | digit
    return torch.tensor(bits).view(torch.float64).item()
