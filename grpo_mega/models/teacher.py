"""Teacher of on-policy distillation: a frozen language model with its own architecture."""

from __future__ import annotations

import torch

from grpo_mega.config.schema import LayoutConfig, ModelConfig
from grpo_mega.models.policy import Policy
from grpo_mega.models.topology import Topology
from grpo_mega.platform import Platform
from grpo_mega.types import Batch


class Teacher(Policy):
    """The teacher's weights under the policy's layout, without gradients and optimizer; not in checkpoints.

    Attributes:
        checksum: Identity of its weights; "" before they are loaded.
    """

    def __init__(
        self, model: ModelConfig, layout: LayoutConfig, vocab_size: int, topology: Topology, platform: Platform
    ) -> None:
        """Builds this rank's part, with weights not yet loaded; see `Model` for the arguments."""
        super().__init__(model, layout, vocab_size, topology, platform, trained=False)
        self.role = "teacher"
        self.checksum = ""

    def logprobs(self, batch: Batch, temperature: float) -> torch.Tensor:
        """[T] log-probs, see `Policy.logprobs`; routed by its own scores, as replay is for the policy only."""
        return super().logprobs(batch.with_(experts=None), temperature)
