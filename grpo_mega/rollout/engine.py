"""What every engine offers: completions of prompts, with the log-probs they were sampled with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from grpo_mega.types import Prompt, Sample

STEPS_BETWEEN_QUESTIONS = 16
"""An engine asks whether it is interrupted at least every so many decode steps."""


@dataclass(frozen=True)
class SamplingParams:
    """How to sample.

    Attributes:
        max_new_tokens: Longest completion.
        stop_ids: A completion ends with the first of these tokens.
        temperature: Logits are divided by it; 0 is greedy.
        top_p: Nucleus sampling; 1 for all tokens.
        top_k: Sample among the k likeliest tokens; 0 for all.
        seed: Seed of the sampling noise.
    """

    max_new_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def greedy(self) -> SamplingParams:
        """The same, always taking the likeliest token."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=0)


class Engine(Protocol):
    """Generates completions with the current policy."""

    def generate(
        self,
        prompts: list[Prompt],
        group_size: int,
        sampling: SamplingParams,
        version: int,
        interrupted: Callable[[], bool] | None = None,
    ) -> list[Sample]:
        """`group_size` samples of every prompt, prompt by prompt; the same list on every rank.

        Args:
            prompts: The same on every rank.
            group_size: Samples per prompt.
            sampling: How to sample.
            version: Policy version; part of the noise key, and written into the samples.
            interrupted: Whether this rank wants generation to be given up; ranks may differ. None, on all ranks or on
                none, when nobody will. Sequences that decode together with one of such a rank are given up within
                `STEPS_BETWEEN_QUESTIONS` decode steps, others may be finished first.

        Raises:
            Interrupted: Sequences were given up. Raised on every rank; the engine is ready for the next call.
        """
        ...
