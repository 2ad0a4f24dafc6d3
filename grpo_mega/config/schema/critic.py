"""The critic of PPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from grpo_mega.config.limits import Interval


@dataclass
class CriticConfig:
    """A model of the policy's architecture that estimates the rewards to come before every token, and is trained beside
    it, with `optimizer`'s settings but for the learning rate. There is one with `algorithm.advantage_baseline=critic`.
    """

    lr: Annotated[float, Interval("(0, inf)")] = 1e-5
    """Peak learning rate; it is warmed up, and falls, as the policy's."""
    gamma: Annotated[float, Interval("[0, 1]")] = 1.0
    """Discount of rewards (GAE, arXiv 1506.02438)."""
    lam: Annotated[float, Interval("[0, 1]")] = 0.95
    """lambda of GAE: from 0, the critic's one-step error, to 1, the sum of rewards less the value."""
    clip: Annotated[float | None, Interval("(0, inf)")] = 0.2
    """What the critic says may move this far from what it said before the step's updates; null for any distance."""
    alone_steps: Annotated[int, Interval("[0, inf)")] = 0
    """First steps in which the critic alone is trained (VC-PPO, arXiv 2503.01491, section 3.1): it begins with the
    policy's body, and with values of 0."""
