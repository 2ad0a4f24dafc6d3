"""The simplest loss of a model with one number per token, for tests that need any loss."""

from __future__ import annotations

import torch

from grpo_mega.models.scalar import ScalarLoss
from grpo_mega.types import ScoredTokens


def squared_error(targets: torch.Tensor) -> ScalarLoss:
    """(value - target)^2 of each token; [T] targets, aligned with the tokens of the replica's batch."""

    def loss(values: torch.Tensor, scored: ScoredTokens) -> torch.Tensor:
        return (values - targets[scored.index]).square()

    return loss
