"""What every engine offers: completions of prompts, with the log-probs they were sampled with, from weights it gets.

`contract.py` says which calls are legal when; two implementations obey it, `embedded.py` and `sglang/engine.py`, and
one suite of tests runs on both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

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


def without_stop(tokens: Sequence[int], reason: str) -> Sequence[int]:
    """A completion's tokens but for the stop token it ended with, if that is why it ended."""
    return tokens[:-1] if reason == "stop" else tokens


class Engine(Protocol):
    """Generates completions with the policy; every rank must make every call but `abort`.

    All methods raise `contract.EngineError` when what is asked is not legal now, and then nothing has changed.
    """

    @property
    def experts_of(self) -> range | None:
        """The routed experts whose weights this rank is to push; None for all of them."""
        ...

    @property
    def version(self) -> int | None:
        """Policy version of the weights that the engine has; None when they were not pushed, or are gone."""
        ...

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
            version: Policy version, which must be that of the weights; part of the noise key, and written into the
                samples.
            interrupted: Whether this rank wants generation to be given up; ranks may differ. None, on all ranks or on
                none, when nobody will. Sequences that decode together with one of such a rank are given up within
                `STEPS_BETWEEN_QUESTIONS` decode steps, others may be finished first.

        Raises:
            Interrupted: Sequences were given up. Raised on every rank; the engine is ready for the next call.
        """
        ...

    def scores(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        """Log-prob of every token but the first given those before it, at temperature 1, by who says so.

        That is each engine, or each of its copies of the attention layers, which are pushed one by one.
        """
        ...

    def begin_update(self) -> None:
        """Opens a session in which all weights are replaced."""
        ...

    def push(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Replaces some weights: pairs (Hugging Face name, whole tensor), the same on every rank but for `experts_of`.

        Raises:
            EngineError: No session is open, or a tensor is unknown, was pushed before, or has another shape or dtype
                than the model's; names it.
        """
        ...

    def end_update(self, version: int) -> None:
        """Closes the session: these were all weights of this policy version.

        Raises:
            EngineError: A tensor is missing, or the version is older than that before.
        """
        ...

    def release(self, tags: Collection[str]) -> None:
        """Gives memory back, `contract.TAGS` says which; released weights must be pushed again after `resume`."""
        ...

    def resume(self, tags: Collection[str]) -> None:
        """Takes released memory again."""
        ...

    def abort(self) -> None:
        """Ends the generation in progress, if there is one: what is unfinished comes back with the reason "abort".

        For one rank alone, from `interrupted` or another thread; the sequences that decode together with its own end.
        """
        ...

    def pids(self) -> list[int]:
        """The processes on this node whose memory it has on this rank's device, that of the policy aside."""
        ...

    def close(self) -> None:
        """Ends the engine and its processes."""
        ...
