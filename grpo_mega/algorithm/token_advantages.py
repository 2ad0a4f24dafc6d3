"""Advantages that differ between the tokens of a completion, from rewards for its steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_mega.algorithm.advantage import group_advantages

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
        here, normal = normal[: len(ends)], normal[len(ends) :]
        at_end = torch.zeros(length, dtype=torch.float64).index_add(0, ends, here.double())
        advantages.append(at_end.flip(0).cumsum(0).flip(0).float())
    return advantages
