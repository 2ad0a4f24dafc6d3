"""The critic of PPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from grpo_mega.config.limits import Interval


@dataclass
class CriticConfig:
    """The critic of PPO: a model of the policy's architecture that estimates the future rewards before every token,
    trained with `optimizer`'s settings except for the learning rate. Used with
    `algorithm.advantage_baseline=critic`.
    """

    lr: Annotated[float, Interval("(0, inf)")] = 1e-5
    """Peak learning rate; its schedule is the policy's."""
    gamma: Annotated[float, Interval("[0, 1]")] = 1.0
    """Discount of rewards (GAE, arXiv 1506.02438)."""
    lam: Annotated[float, Interval("[0, 1]")] = 0.95
    """lambda of GAE: from 0, the critic's one-step error, to 1, the sum of rewards less the value."""
    clip: Annotated[float | None, Interval("(0, inf)")] = 0.2
    """Clip range of a value around its value before the step's updates; null for none."""
    alone_steps: Annotated[int, Interval("[0, inf)")] = 0
    """Number of first steps that train only the critic (VC-PPO, arXiv 2503.01491, section 3.1), which starts with the
    policy's body and values of 0."""
