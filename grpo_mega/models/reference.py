"""The reference policy of the KL term: a copy of the weights, put in place of the policy's own to score a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch

from grpo_mega.models.policy import Policy
from grpo_mega.types import Batch


class ReferencePolicy:
    """The weights (and routing biases) a policy had at its last refresh, `held` beside it."""

    role = "reference"

    def __init__(self, policy: Policy) -> None:
        """Starts as the policy is now."""
        self.policy = policy
        policy.gather_parameters()
        self.held = [t.detach().clone() for t in self._live]

    @property
    def _live(self) -> list[torch.Tensor]:
        """The policy's own; asked of it each time, because while it is off the device there are none."""
        return [*chain(self.policy.chunks.parameters(), self.policy.chunks.buffers())]

    @torch.no_grad()
    def refresh(self) -> None:
        """Becomes a copy of the policy as it is now (DeepSeek-R1 does so every 400 steps)."""
        self.policy.gather_parameters()
        for held, live in zip(self.held, self._live, strict=True):
            held.copy_(live)

    def logprobs(self, batch: Batch, temperature: float) -> torch.Tensor:
        """[T] log-probs under the reference, see `Policy.logprobs`; its own scores choose the experts."""
        with self.in_place():
            return self.policy.logprobs(batch.with_(experts=None), temperature)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The policy's model holds the reference weights inside; its own come back bit for bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        self.policy.gather_parameters()
        for held, live in zip(self.held, self._live, strict=True):
            kept = live.clone()
            live.copy_(held)
            held.copy_(kept)
