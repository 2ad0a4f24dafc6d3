"""The papers' objectives over every sampled output, written down sequence after sequence in float64.

Takes nothing from the project but the names of its settings, and knows nothing of packing, weights or mini-batches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def gradient(
    groups: list[tuple[tuple[float, ...], list[int]]],
    logprob: Tensor,
    old: Tensor,
    ref: Tensor,
    config: Any,
    longest: int,
    steps: list[list[tuple[tuple[int, float], ...]]] | None = None,
) -> Tensor:
    """Derivative of the loss with respect to the log-prob of each completion token, by autograd.

    Args:
        groups: Rewards and completion lengths of each group's outputs.
        logprob, old, ref: [n] of all completion tokens, output after output.
        config: The settings of the algorithm.
        longest: What Dr. GRPO divides by.
        steps: (last token, reward) of each step of each group's outputs, if steps are rewarded and not outputs.
    """
    leaf = logprob.double().requires_grad_()
    lengths = [length for _, of_group in groups for length in of_group]
    per_output = zip(leaf.split(lengths), old.double().split(lengths), ref.double().split(lengths), strict=True)
    advantages: list[Any] = [a for rewards, _ in groups for a in group_advantages(rewards, config.advantage_std)]
    if steps:
        advantages = [
            a
            for (_, of_group), own in zip(groups, steps, strict=True)
            for a in step_advantages(own, of_group, config.advantage_std)
        ]
    objectives = [
        output_objective(*vectors, advantage, config) for vectors, advantage in zip(per_output, advantages, strict=True)
    ]
    if config.aggregation == "sequence_mean":  # DeepSeekMath, equation 3: 1/G sum_i 1/|o_i| sum_t
        objective = sum(tokens.mean() for tokens in objectives) / len(objectives)
    elif config.aggregation == "constant":  # Dr. GRPO: 1/G sum_i 1/L sum_t
        objective = sum(tokens.sum() for tokens in objectives) / (len(objectives) * longest)
    else:  # DAPO, equation 8: 1 / sum_i |o_i| sum_i sum_t
        objective = sum(tokens.sum() for tokens in objectives) / sum(lengths)
    (by_logprob,) = torch.autograd.grad(-objective, leaf)
    return by_logprob


def group_advantages(rewards: tuple[float, ...], std: str) -> list[float]:
    """0 for a group of equal rewards."""
    mean = sum(rewards) / len(rewards)
    if std == "none" or len(set(rewards)) == 1:
        return [r - mean for r in rewards]
    divisor = len(rewards) - 1 if std == "sample" else len(rewards)
    deviation = (sum((r - mean) ** 2 for r in rewards) / divisor) ** 0.5
    return [(r - mean) / deviation for r in rewards]


def step_advantages(steps: list[tuple[tuple[int, float], ...]], lengths: list[int], std: str) -> list[Tensor]:
    """[|o|] for each output: the normalised rewards of the steps that end at a token or after it."""
    normal = iter(group_advantages(tuple(r for of_output in steps for _, r in of_output), std))
    own = [[(end, next(normal)) for end, _ in of_output] for of_output in steps]
    return [
        torch.tensor([sum(a for end, a in of_output if end >= t) for t in range(length)], dtype=torch.float64)
        for of_output, length in zip(own, lengths, strict=True)
    ]


def output_objective(logprob: Tensor, old: Tensor, ref: Tensor, advantage: float | Tensor, config: Any) -> Tensor:
    """[|o|] what is maximised: min(rho A, clip(rho) A) - beta * (exp(ref - logprob) - (ref - logprob) - 1)."""
    log_ratio = logprob - old
    ratio = (log_ratio.mean() if config.objective == "gspo" else log_ratio).exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    kl = (ref - logprob).exp() - (ref - logprob) - 1
    return torch.minimum(ratio * advantage, clipped * advantage) - config.kl_coef * kl
