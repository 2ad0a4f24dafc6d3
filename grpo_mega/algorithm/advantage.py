"""How much better a sample is than the other samples of its prompt."""

from __future__ import annotations

import torch
from torch import Tensor

STD_EPSILON = 1e-6
"""Added to the standard deviation. Far below any difference between rewards that means something, far above rounding:
rewards that differ only in their last bits must not turn into advantages of size one."""


def group_advantages(rewards: Tensor, std: str) -> Tensor:
    """Group-relative advantages of one prompt's samples: (reward - mean) / (standard deviation + epsilon).

    DeepSeekMath (arXiv 2402.03300), section 4.1.2, outcome supervision; with `std="none"` the centred rewards of
    Dr. GRPO (arXiv 2503.20783). Rewards that are all equal give exactly 0, so such a group updates nothing.

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
    if (rewards == rewards[0]).all():  # the mean of equal numbers need not round back to them
        return torch.zeros_like(rewards, dtype=torch.float32)
    centred = rewards.double() - rewards.double().mean()
    if std == "none":
        return centred.float()
    return (centred / (centred.std(correction=1 if std == "sample" else 0) + STD_EPSILON)).float()
