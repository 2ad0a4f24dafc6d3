"""The teacher of on-policy distillation: a language model of an architecture of its own that is never trained."""

from __future__ import annotations

import torch

from grpo_mega.config.schema import LayoutConfig, ModelConfig
from grpo_mega.models.policy import Policy
from grpo_mega.models.topology import Topology
from grpo_mega.platform import Platform
from grpo_mega.types import Batch


class Teacher(Policy):
    """Weights alone, under the layout of the policy: no gradients, no optimizer, and no part of checkpoints.

    Attributes:
        checksum: What tells its weights from others; "" before they are loaded.
    """

    def __init__(
        self, model: ModelConfig, layout: LayoutConfig, vocab_size: int, topology: Topology, platform: Platform
    ) -> None:
        """Builds this rank's part, with weights that are not yet loaded; for the arguments see `Model`."""
        super().__init__(model, layout, vocab_size, topology, platform, trained=False)
        self.role = "teacher"
        self.checksum = ""

    def logprobs(self, batch: Batch, temperature: float) -> torch.Tensor:
        """[T] log-probs, see `Policy.logprobs`; routed by its own scores: an engine's choices are for the policy."""
        return super().logprobs(batch.with_(experts=None), temperature)
