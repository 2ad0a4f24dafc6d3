"""Synchronises the trained weights to an engine: pushes them in buckets, then checks the engine's log-probs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from grpo_mega.algorithm.mismatch import explained_by_rounding
from grpo_mega.models.policy import Policy
from grpo_mega.platform import trace
from grpo_mega.rollout.contract import EngineError
from grpo_mega.rollout.engine import Engine
from grpo_mega.types import pack_tokens
from grpo_mega.weights.stream import Traffic, hf_buckets

LONGEST = 1024
"""Length of the compared text in tokens: each of DeepSeek-V3's 256 experts would get 32 of them on average."""


class WeightSync:
    """Sends the weights of a policy to an engine.

    Attributes:
        traffic: Amount of data moved since the last `take_traffic`.
    """

    def __init__(
        self,
        policy: Policy,
        engine: Engine,
        byte_budget: int,
        verify_every: int,
        text: Sequence[int],
        fp8: bool = False,
    ) -> None:
        """Buckets have at most `byte_budget` bytes; the first sync is verified, and every `verify_every`th.

        `text` has two or more tokens whose log-probs are compared; best typical ones, because rounding matters least
        where the model is confident. With `fp8` the engine rounds the weights to 8 bits.
        """
        self._explained = explained_by_rounding(policy.architecture.dtype, fp8)
        self._policy, self._engine = policy, engine
        self._text = text[: min(LONGEST, policy.context)]
        self._byte_budget, self._verify_every = byte_budget, verify_every
        self._syncs = 0
        self.traffic = Traffic()

    def send(self, version: int, between: Callable[[], None] = lambda: None) -> None:
        """Pushes all weights as those of `version`, and calls `between` after every bucket; every rank must call it.

        Raises:
            EngineError: The engine refused a tensor, or failed; see `Engine.push`.
        """
        # With overlapped communication, parameters that the last update changed may not have been gathered yet.
        self._policy.gather_parameters()
        self._engine.begin_update()
        for bucket in hf_buckets(self._policy, self._byte_budget, self._engine.experts_of, self.traffic):
            with trace.span("push", tensors=len(bucket)):
                self._engine.push(bucket)
            # Otherwise two buckets would be alive while the next one is made.
            del bucket
            between()
        self._engine.end_update(version)
        self._syncs += 1

    def start_anew(self) -> None:
        """Makes the next sync verified like the first, after an engine was replaced."""
        self._syncs = 0

    def expected(self) -> list[float] | None:
        """The trainer's log-probs of the text for `verify`; None when no check is due."""
        if (self._syncs - 1) % self._verify_every:
            return None
        batch = pack_tokens([self._text], [1])
        return self._policy.logprobs(batch, temperature=1.0)[1:].tolist()

    def verify(self, expected: list[float]) -> float:
        """Compares the engines' log-probs with the trainer's; returns the largest mean difference.

        Raises:
            EngineError: They differ by more than rounding.
        """
        with trace.span("verify"):
            scores = self._engine.scores(self._text)
        distances = {
            name: sum(abs(x - y) for x, y in zip(expected, logprobs, strict=True)) / len(expected)
            for name, logprobs in scores.items()
        }
        for name, distance in distances.items():
            # `not <=` rather than `>`, so that NaN is refused as well.
            if not distance <= self._explained:
                raise EngineError(
                    f"{name} does not compute with the weights that it was sent: its log-probs of "
                    f"{len(expected)} tokens differ from the trainer's by {distance:.3g} on average, and rounding "
                    f"explains {self._explained:g}. Compare its model, names and dtype with the trainer's"
                )
        return max(distances.values())

    def take_traffic(self) -> Traffic:
        """Returns and resets the amount of data moved since the last call."""
        taken, self.traffic = self.traffic, Traffic()
        return taken
