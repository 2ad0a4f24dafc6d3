"""Advantages from a critic's values: generalized advantage estimation (GAE)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mega.types import Batch


def generalized_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, cu_seqlens: Tensor, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (GAE, arXiv 1506.02438, equation 16) of terminated completions.

    With delta_t = r_t + gamma V_{t+1} - V_t and V = 0 after the last token of a completion, A_t is the sum over l of
    (gamma lam)^l delta_{t+l}.

    Args:
        rewards: [T] reward of each token.
        values: [T] the critic's value before each token.
        mask: [T] bool, tokens of completions; others do not belong to a sample.
        cu_seqlens: [N + 1] integers, start of every sequence, then T.
        gamma: Discount of rewards, from 0 to 1.
        lam: From 0, the critic's one-step error, to 1, the sum of rewards less the value.

    Returns:
        [T] advantages and [T] returns, A + V, the critic's targets; float32, 0 outside of `mask`.
    """
    tokens = mask.nonzero()[:, 0]
    # `through[i]` is the number of masked-in tokens before token i, over all sequences.
    through = torch.cat([torch.zeros(1, dtype=torch.int64), mask.cumsum(0)])
    ends = through[cu_seqlens[1:]].repeat_interleave(cu_seqlens.diff())
    # Tokens are aligned at the ends of their completions, so that one loop over distances serves all of them.
    before_end = (ends - through[1:])[tokens]
    shape = len(cu_seqlens) - 1, int(before_end.max()) + 1 if len(tokens) else 0
    sequence = torch.arange(shape[0]).repeat_interleave(cu_seqlens.diff())[tokens]

    def table(column: Tensor) -> Tensor:
        """Reorders [T] -> [longest, N], with the last token of every completion first."""
        return torch.zeros(shape, dtype=torch.float64).index_put((sequence, before_end), column[tokens].double()).T

    value = table(values)
    following = torch.cat([value.new_zeros(1, shape[0]), value[:-1]])
    deltas = table(rewards) + gamma * following - value
    advantages, later = torch.zeros_like(deltas), deltas.new_zeros(shape[0])
    # Row 0 has the last token of every completion: going down the rows goes back in time in all of them at once.
    for distance, delta in enumerate(deltas):
        later = delta + gamma * lam * later
        advantages[distance] = later
    of_tokens = advantages[before_end, sequence]
    result, returns = torch.zeros(len(mask)), torch.zeros(len(mask))
    result[tokens], returns[tokens] = of_tokens.float(), (of_tokens + values[tokens]).float()
    return result, returns


def whitened(advantages: Tensor, mask: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """[T] masked-in advantages minus their mean, divided by their standard deviation (n - 1 under the root).

    Mean and deviation are over all ranks of `group`, on CPU tensors, and so the same under every layout; all must call
    this. Other tokens become 0, as do all when they are equal.
    """
    mean, variance = _moments(advantages, mask, group)
    # Differences that are only rounding count as equal: divided by their deviation, they would become advantages of
    # size 1.
    scale = variance.rsqrt() if variance > 1e-20 * mean.square() else 0.0
    return torch.where(mask, (advantages.double() - mean) * scale, 0.0).float()


def explained_variance(batch: Batch, group: dist.ProcessGroup | None = None) -> float:
    """1 - Var(returns - values) / Var(returns) over the masked-in tokens of the batches of all ranks of `group`.

    1 for a perfect critic, 0 for one that is no better than a constant; also 0 when all returns are equal.
    """
    assert batch.value is not None, "a critic's batch has values"
    assert batch.returns is not None, "a critic's batch has returns"
    _, unexplained = _moments(batch.returns - batch.value, batch.mask, group)
    _, variance = _moments(batch.returns, batch.mask, group)
    return float(1 - unexplained / variance) if variance > 0 else 0.0


def _moments(values: Tensor, mask: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Mean and variance (n - 1) of the masked-in values of all ranks, in float64; variance 0 below two values."""
    here = values[mask].double()
    sums = torch.stack([here.sum(), torch.tensor(float(len(here)), dtype=torch.float64)])
    if group is not None:
        dist.all_reduce(sums, group=group)
    mean = sums[0] / sums[1].clamp(min=1)
    # A second reduction, around the mean: the difference between a sum of squares and a squared mean would cancel.
    squares = (here - mean).square().sum()
    if group is not None:
        dist.all_reduce(squares, group=group)
    return mean, squares / (sums[1] - 1).clamp(min=1)
