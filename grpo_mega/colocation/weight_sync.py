"""Gives an engine the weights that are trained: pushed in buckets, then checked by what the engine makes of them."""

from __future__ import annotations

from collections.abc import Callable

from grpo_mega.colocation.weight_stream import Traffic, hf_buckets
from grpo_mega.policy.policy import Policy
from grpo_mega.rollout.contract import EngineError
from grpo_mega.rollout.engine import Engine
from grpo_mega.types import pack_tokens

TOLERANCE = {"fp32": 1e-4, "bf16": 0.1}
"""Mean difference of the log-probs of a sequence, in nats, that rounding alone does not reach; by `model.dtype`."""
LONGEST = 64
"""Tokens of the sequence that is compared."""


class WeightSync:
    """The way of the weights from a policy to an engine.

    Attributes:
        traffic: What was moved since it was taken away last.
    """

    def __init__(self, policy: Policy, engine: Engine, byte_budget: int, verify_every: int) -> None:
        """Buckets have at most `byte_budget` bytes; the first sync is verified, and every `verify_every`th."""
        self._policy, self._engine = policy, engine
        self._byte_budget, self._verify_every = byte_budget, verify_every
        self._syncs = 0
        self._verified: int | None = None
        self.traffic = Traffic()

    def send(self, version: int, between: Callable[[], None] = lambda: None) -> None:
        """Pushes all weights as those of `version`, and calls `between` after every bucket; every rank must call it.

        Raises:
            EngineError: The engine refused a tensor, or failed; see `Engine.push`.
        """
        self._policy.gather_parameters()
        self._engine.begin_update()
        for bucket in hf_buckets(self._policy, self._byte_budget, traffic=self.traffic):
            self._engine.push(bucket)
            between()
        self._engine.end_update(version)
        self._syncs += 1

    def expected(self) -> list[float] | None:
        """The trainer's log-probs of a sequence, for `verify`; None when it is not yet time again."""
        if (self._syncs - 1) % self._verify_every:
            return None
        batch = pack_tokens([self._sequence()], [1])
        return self._policy.logprobs(batch, temperature=1.0)[1:].tolist()

    def verify(self, expected: list[float]) -> None:
        """Compares the engine's log-probs with the trainer's.

        Raises:
            EngineError: They differ by more than rounding.
        """
        tolerance = TOLERANCE[self._policy.architecture.dtype]
        for number, found in enumerate(self._engine.scores(self._sequence())):
            distance = sum(abs(a - b) for a, b in zip(expected, found, strict=True)) / len(expected)
            if not distance <= tolerance:
                raise EngineError(
                    f"engine {number} does not compute with the weights that it was sent: its log-probs of "
                    f"{len(expected)} tokens differ from the trainer's by {distance:.3g} on average, and rounding "
                    f"explains {tolerance:g}. Compare its model, names and dtype with the trainer's"
                )

    def take_traffic(self) -> Traffic:
        """What was moved since the last call."""
        taken, self.traffic = self.traffic, Traffic()
        return taken

    def _sequence(self) -> list[int]:
        """Tokens all over the vocabulary; any sequence does."""
        length = min(LONGEST, self._policy.context)
        return [(i * i * 7 + i * 3 + 1) % self._policy.vocab_size for i in range(length)]
