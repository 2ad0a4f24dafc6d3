"""What every engine offers: completions of prompts, with the log-probs they were sampled with, from weights it gets.

`contract.py` says which calls are legal when; two implementations obey it, `embedded.py` and `sglang/engine.py`, and
one suite of tests runs on both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from grpo_mega.rollout.pool import Wanted
from grpo_mega.types import Prompt, Sample

STEPS_PER_POLL = 16
"""A poll of the embedded engine draws at most this many tokens of each sequence."""


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


def by_prompt(wanted: Sequence[Wanted]) -> list[list[Wanted]]:
    """Cuts samples that follow each other, as those of one prompt do, into groups of one prompt each."""
    groups: list[list[Wanted]] = []
    for prompt, index in wanted:
        if not groups or groups[-1][-1][0] is not prompt or groups[-1][-1][1] >= index:
            groups.append([])
        groups[-1].append((prompt, index))
    return groups


def without_stop(tokens: Sequence[int], reason: str) -> Sequence[int]:
    """A completion's tokens but for the stop token it ended with, if that is why it ended."""
    return tokens[:-1] if reason == "stop" else tokens


class Engine(Protocol):
    """Generates completions with the policy, and hands them out one by one.

    Every rank makes the same calls in the same order, with the same arguments but where a docstring says otherwise;
    only `abort` is for one rank alone. All methods raise `contract.EngineError` when what is asked is not legal now,
    and then nothing has changed.
    """

    @property
    def experts_of(self) -> range | None:
        """The routed experts whose weights this rank is to push; None for all of them."""
        ...

    @property
    def version(self) -> int | None:
        """Policy version of the weights that the engine has; None when they were not pushed, or are gone."""
        ...

    @property
    def busy(self) -> bool:
        """Whether samples are under way: they were submitted, and not handed out or dropped; on all ranks alike."""
        ...

    def submit(self, wanted: Sequence[Wanted], sampling: SamplingParams, version: int) -> None:
        """These samples are under way from now on; also while others are.

        Args:
            wanted: (prompt, which of the prompt's samples it is); samples of one prompt follow each other.
            sampling: How to sample.
            version: Policy version, which must be that of the weights; part of the noise key, and written into the
                samples.
        """
        ...

    def poll(self, interrupted: bool = False) -> list[Sample]:
        """Samples that are finished by now, each exactly once, in the order of submission; the same on every rank.

        Generation goes on for a while meanwhile: `STEPS_PER_POLL` decode steps, or part of a second. An engine with
        processes of its own generates between two polls as well. Until no sample is under way every rank polls, equally
        often; a rank that does not keeps the others waiting.

        Args:
            interrupted: Whether this rank wants all that is under way to be given up; ranks may differ.

        Raises:
            Interrupted: On every rank, when one was interrupted.
            EngineRestarted: An engine was lost; see there.
            EngineError: Nothing is under way, or an engine failed.

        Whatever it raises, all that was under way is dropped; what was handed out before is not affected.
        """
        ...

    def abort(self) -> None:
        """Ends all that is under way: the next polls hand it out with the tokens there are and the reason "abort".

        For one rank alone, from any thread; the samples of all ranks end. Does nothing when nothing is under way.
        """
        ...

    def generate(
        self,
        prompts: list[Prompt],
        group_size: int,
        sampling: SamplingParams,
        version: int,
        interrupted: Callable[[], bool] | None = None,
    ) -> list[Sample]:
        """`group_size` samples of every prompt, prompt by prompt; see `producer.generate`."""
        ...

    def scores(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        """Log-prob of every token but the first given those before it, at temperature 1, as each engine sees it.

        {name of the engine, or of one of its copies of the attention layers, which are pushed one by one: log-probs}
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

    def pids(self) -> list[int]:
        """The processes on this node whose memory it has on this rank's device, that of the policy aside."""
        ...

    def close(self) -> None:
        """Ends the engine and its processes."""
        ...
