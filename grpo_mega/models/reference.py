"""Models that only score: a teacher, and the reference policy of the KL term.

The reference is a copy of the policy's weights that is swapped in to score a batch. If the policy has adapters, only
they are copied, because its other weights never change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain

import torch

from grpo_mega.config.schema import LayoutConfig, ModelConfig
from grpo_mega.models.adapters import is_adapter
from grpo_mega.models.policy import Policy
from grpo_mega.models.topology import Topology
from grpo_mega.platform import Platform
from grpo_mega.types import Batch


class ReferencePolicy:
    """Copy of a policy's weights (and routing biases) at the last refresh.

    Attributes:
        held: Tensors of the copy, in the order of the policy's parameters and buffers.
    """

    role = "reference"

    def __init__(self, policy: Policy) -> None:
        """Copies the policy's current weights."""
        self.policy = policy
        policy.gather_parameters()
        self.held = [t.detach().clone() for t in self._live]

    @property
    def topology(self) -> Topology:
        """The policy's topology."""
        return self.policy.topology

    @property
    def _live(self) -> list[torch.Tensor]:
        """The policy's tensors that may change; looked up each time, because an offloaded policy has none."""
        named = self.policy.chunks.named_parameters()
        parameters = (p for name, p in named if self.policy.lora is None or is_adapter(name))
        return [*chain(parameters, self.policy.chunks.buffers())]

    @torch.no_grad()
    def refresh(self) -> None:
        """Copies the policy's current weights (DeepSeek-R1 does so every 400 steps)."""
        self.policy.gather_parameters()
        for held, live in zip(self.held, self._live, strict=True):
            held.copy_(live)

    def logprobs(self, batch: Batch, temperature: float) -> torch.Tensor:
        """[T] log-probs under the reference, see `Policy.logprobs`; routed by its own scores, without replay."""
        with self.swapped_in():
            return self.policy.logprobs(batch.with_(experts=None), temperature)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Context in which the policy's model has the reference weights; then the policy's again, bit for bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @contextmanager
    def saved(self) -> Iterator[None]:
        """`swapped_in`, with saving and loading of the policy's model restricted to the tensors of the reference."""
        chunks = self.policy.chunks
        # If the policy has adapters, the reference holds only them; the other weights are saved and loaded with the
        # policy.
        with self.swapped_in(), chunks.adapters_alone() if self.policy.lora else nullcontext():
            yield

    @torch.no_grad()
    def _exchange(self) -> None:
        self.policy.gather_parameters()
        for held, live in zip(self.held, self._live, strict=True):
            # One tensor after the other, so that only one extra tensor exists at a time, not a third copy of the model.
            kept = live.clone()
            live.copy_(held)
            held.copy_(kept)


class Teacher(Policy):
    """The teacher's weights under the policy's layout, without gradients and optimizer; not in checkpoints.

    Attributes:
        checksum: Identity of its weights; "" before they are loaded.
    """

    role = "teacher"

    def __init__(
        self, model: ModelConfig, layout: LayoutConfig, vocab_size: int, topology: Topology, platform: Platform
    ) -> None:
        """Builds this rank's part, with weights not yet loaded; see `Model` for the arguments."""
        super().__init__(model, layout, vocab_size, topology, platform, optimizer=None)
        self.checksum = ""

    def logprobs(self, batch: Batch, temperature: float) -> torch.Tensor:
        """[T] log-probs, see `Policy.logprobs`; routed by its own scores, as replay is for the policy only."""
        return super().logprobs(batch.with_(experts=None), temperature)
