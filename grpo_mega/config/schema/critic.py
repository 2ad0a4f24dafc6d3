"""The critic of PPO."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class CriticConfig:
    """A model of the policy's architecture that estimates the rewards to come before every token, and is trained beside
    it, with `optimizer`'s settings but for the learning rate. There is one with `algorithm.advantage_baseline=critic`.
    """

    lr: float = 1e-5
    """Peak learning rate; it is warmed up, and falls, as the policy's."""
    gamma: float = 1.0
    """Discount of rewards (GAE, arXiv 1506.02438)."""
    lam: float = 0.95
    """lambda of GAE: from 0, the critic's one-step error, to 1, the sum of rewards less the value."""
    clip: float | None = 0.2
    """What the critic says may move this far from what it said before the step's updates; null for any distance."""
    alone_steps: int = 0
    """First steps in which the critic alone is trained (VC-PPO, arXiv 2503.01491, section 3.1): it begins with the
    policy's body, and with values of 0."""
