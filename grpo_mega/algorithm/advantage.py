"""Group-relative advantages: a sample's reward compared with the other samples of its prompt.

With rewards for steps, advantages differ between the tokens of a completion."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BASELINES = ("mean", "leave_one_out", "optimal")
STDS = ("sample", "population", "mean", "none", "batch", "batch_rewards")

ROUNDING = 1e-6
"""Where their differences are divided, rewards count as equal when their spread is at most this fraction of the
largest: a few units in the last place of float32, in which many rewards are computed. Divided by their standard
deviation, such differences would become advantages of size one."""

SMALLEST = torch.finfo(torch.float32).tiny
"""Rewards count as equal when their spread is not above this: float32 could not hold their advantages."""


def has_signal(rewards: Sequence[float], std: str) -> bool:
    """Whether at least two of the (finite) rewards differ: by more than `SMALLEST` where std is "none", because nothing
    magnifies rounding there; otherwise by more than `ROUNDING` times the largest.

    Every count of groups with signal asks here, so that it agrees with the advantages.
    """
    if len(rewards) < 2:
        return False
    low, high = min(rewards), max(rewards)
    return high - low > (SMALLEST if std == "none" else ROUNDING * max(abs(low), abs(high)))


def group_advantages(rewards: Tensor, std: str, baseline: str = "mean", lengths: Sequence[int] = ()) -> Tensor:
    """Group-relative advantages of one prompt's samples: (reward - baseline) / scale.

    - DeepSeekMath (arXiv 2402.03300), section 4.1.2: baseline "mean", std "sample" or "population";
    - Dr. GRPO (arXiv 2503.20783), equation 4: "mean", "none";
    - RLOO (arXiv 2402.14740): "leave_one_out", "none", which is G / (G - 1) times Dr. GRPO's;
    - OPO (arXiv 2505.23585): "optimal", "none";
    - MaxRL (arXiv 2602.02710): "mean", "mean".

    In a group without signal (see `has_signal`) all advantages are exactly 0; any other group has at least one nonzero
    advantage. Nothing is added to the standard deviation, so advantages do not change when all rewards are multiplied
    by a positive number (with "none" they are multiplied as well) or, unless the mean divides, shifted by a number that
    leaves their differences above rounding.

    Args:
        rewards: [G] total rewards of one group, G at least 2.
        std: Divisor of the differences: the standard deviation, "sample" (divides by G - 1 under the root) or
            "population" (by G); the "mean" reward; "none" (no division); or what the caller divides by, "batch" or
            "batch_rewards" (see `AdvantageOptions`).
        baseline: Baseline subtracted from a reward: the "mean" of the group; "leave_one_out", the mean of the others;
            "optimal", the mean weighted by length, which minimises the variance of the gradient if its norm grows as
            the square root of the length.
        lengths: Tokens of each sample, for "optimal".

    Returns:
        [G] float32.

    Raises:
        ValueError: `rewards` is not a vector of at least two finite numbers, is negative where the mean divides,
            `lengths` do not fit it, or a name is unknown.
    """
    if std not in STDS:
        raise ValueError(f"advantage_std is {std!r}; use one of {', '.join(STDS)}")
    if baseline not in BASELINES:
        raise ValueError(f"advantage_baseline is {baseline!r}; use mean, leave_one_out or optimal")
    if rewards.dim() != 1 or len(rewards) < 2:
        raise ValueError(f"rewards have shape {list(rewards.shape)}; a group is a vector of at least 2 (group_size)")
    # Rewards that are finite in float64 may overflow float32, the dtype of the result.
    if not rewards.float().isfinite().all():
        raise ValueError(f"rewards {rewards.tolist()} are not all finite in float32; check the reward functions")
    if std == "mean" and (rewards < 0).any():
        raise ValueError(f"rewards {rewards.tolist()} are not all positive or 0, as advantage_std=mean needs them")
    if not has_signal(rewards.tolist(), std):
        return torch.zeros_like(rewards, dtype=torch.float32)
    # Rescaled to [0, 1]: no square over- or underflows, and a difference far below the rewards keeps its digits.
    rewards = rewards.double()
    spread = rewards.max() - rewards.min()
    scaled = (rewards - rewards.min()) / spread
    centred = scaled - _baseline(scaled, baseline, lengths)
    if std in ("none", "batch", "batch_rewards"):
        return (centred * spread).float()
    if std == "mean":
        # The mean is positive: no reward is negative, and in a group with signal not all are 0.
        return (centred * (spread / rewards.mean())).float()
    # The spread cancels: differences and their deviation are both in units of it.
    return (centred / scaled.std(correction=1 if std == "sample" else 0)).float()


def _baseline(rewards: Tensor, baseline: str, lengths: Sequence[int]) -> Tensor:
    """[] or [G] baseline subtracted from each of [G] rewards."""
    if baseline == "mean":
        return rewards.mean()
    if baseline == "leave_one_out":
        return (rewards.sum() - rewards) / (len(rewards) - 1)
    weight = torch.tensor(lengths, dtype=torch.float64, device=rewards.device)
    if len(weight) != len(rewards) or (weight < 0).any() or weight.sum() == 0:
        raise ValueError(f"lengths are {list(lengths)}; each of the {len(rewards)} rewards needs one, and not all 0")
    return (weight * rewards).sum() / weight.sum()


Steps = Sequence[tuple[int, float]]
"""(index of the step's last token in the completion, reward) of each step of a completion, in order."""


def process_advantages(steps: Sequence[Steps], lengths: Sequence[int], std: str = "sample") -> list[Tensor]:
    """Process supervision of GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.3).

    The rewards of all steps of a group are normalised together, by their mean and their standard deviation. The
    advantage of a token is the sum of the normalised rewards of the steps that end at it or after it. A group whose
    rewards are all equal has advantages of exactly 0.

    Args:
        steps: Steps of each of the group's G completions.
        lengths: Number of tokens of each completion.
        std: As in `group_advantages`.

    Returns:
        G tensors, [length] float32 each.

    Raises:
        ValueError: A step ends outside its completion, or see `group_advantages`.
    """
    rewards = torch.tensor([reward for of_sample in steps for _, reward in of_sample], dtype=torch.float64)
    normal = group_advantages(rewards, std) if len(rewards) > 1 else torch.zeros(len(rewards))
    advantages = []
    for sample, (of_sample, length) in enumerate(zip(steps, lengths, strict=True)):
        ends = torch.tensor([end for end, _ in of_sample], dtype=torch.int64)
        if ((ends < 0) | (ends >= length)).any():
            raise ValueError(f"steps of sample {sample} end at {ends.tolist()}; its tokens are 0 to {length - 1}")
        # `normal` has the steps of all samples one after the other; each sample takes its own off the front.
        here, normal = normal[: len(ends)], normal[len(ends) :]
        at_end = torch.zeros(length, dtype=torch.float64).index_add(0, ends, here.double())
        advantages.append(at_end.flip(0).cumsum(0).flip(0).float())
    return advantages
