"""How much better a sample is than the other samples of its prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ROUNDING = 1e-6
"""Rewards whose spread is no more than this part of the largest of them are equal: a few units in the last place of
float32, in which many a reward is computed. Divided by their standard deviation they would become advantages of size
one."""


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether the rewards of a group, finite numbers, differ by more than `ROUNDING` of the largest size among them."""
    low, high = min(rewards), max(rewards)
    return high - low > ROUNDING * max(abs(low), abs(high))


def group_advantages(rewards: Tensor, std: str) -> Tensor:
    """Group-relative advantages of one prompt's samples: (reward - mean) / standard deviation.

    DeepSeekMath (arXiv 2402.03300), section 4.1.2, outcome supervision; with `std="none"` the centred rewards of
    Dr. GRPO (arXiv 2503.20783).

    A group without signal (see `has_signal`) has advantages of exactly 0. Otherwise nothing is added to the standard
    deviation, so advantages do not change when all rewards are multiplied by a positive number (with "none" they are
    multiplied as well) or shifted by one that leaves their differences above rounding.

    Args:
        rewards: [G] total rewards of one group, G at least 2.
        std: "sample" (divides by G - 1 under the root), "population" (by G) or "none" (no division).

    Returns:
        [G] float32.

    Raises:
        ValueError: `rewards` is not a vector of at least two finite numbers, or `std` is unknown.
    """
    if std not in ("sample", "population", "none"):
        raise ValueError(f"advantage_std is {std!r}; use sample, population or none")
    if rewards.dim() != 1 or len(rewards) < 2:
        raise ValueError(f"rewards have shape {list(rewards.shape)}; a group is a vector of at least 2 (group_size)")
    if not rewards.float().isfinite().all():
        raise ValueError(f"rewards {rewards.tolist()} are not all finite in float32; check the reward functions")
    if not has_signal(rewards.tolist()):
        return torch.zeros_like(rewards, dtype=torch.float32)
    size = rewards.double().abs().max()
    scaled = rewards.double() / size  # of which no square over- or underflows
    centred = scaled - scaled.mean()
    if std == "none":
        return (centred * size).float()
    return (centred / centred.std(correction=1 if std == "sample" else 0)).float()
