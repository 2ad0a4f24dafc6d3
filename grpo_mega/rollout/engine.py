"""Interface of an engine: completions of prompts, handed out one by one, from weights that are pushed to it.

`contract.py` decides which calls are legal when. There are two implementations, `embedded.py` and `sglang/engine.py`,
tested by one suite. `stream.py` collects the samples.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch

from grpo_mega.types import Prompt, Sample

Item = TypeVar("Item")

SLICE = "slice"
"""Finish reason of a sample that was handed out unfinished, to go on later."""
TURN = "turn"
"""Finish reason of a sample that goes on after an environment's reply, which it already has."""
UNFINISHED = (SLICE, TURN)
STEPS_PER_POLL = 16
"""Tokens of each sequence that one poll of the embedded engine samples at most."""


@dataclass(frozen=True)
class Wanted:
    """A sample to generate, from its first token or from where it was left.

    Attributes:
        prompt: Its prompt.
        index: Its index among the prompt's samples.
        so_far: The sample as it was handed out, to go on after its tokens; None to begin. Its tokens are read again, by
            the present weights; limits and the noise of tokens count from its beginning.
        most: Largest number of tokens to sample now. A sample that is not finished then is handed out with the reason
            `SLICE`. None for no limit.
        draw: The draw of its noise, which must be the same in all its parts; None for that of `SamplingParams`.
        number: The caller's number for it, which comes back in `Sample.number`.
    """

    prompt: Prompt
    index: int
    so_far: Sample | None = None
    most: int | None = None
    draw: int | None = None
    number: int = 0

    @property
    def prefix(self) -> list[int]:
        """The tokens that it goes on after, and sees: all of them, or those of its last piece."""
        before = self.so_far
        if before and before.restarts:
            return [*before.token_ids[before.restarts[-1] :]]
        return [*self.prompt.token_ids, *(before.token_ids if before else ())]

    def limits(self, max_new_tokens: int, context: int) -> tuple[int, int]:
        """Largest numbers of tokens to sample: now, and until it is finished.

        The prompt and all pieces of a sample together fit in `context`.
        """
        size, sampled = (len(self.so_far.token_ids), self.so_far.sampled) if self.so_far else (0, 0)
        left = min(max_new_tokens - sampled, context - len(self.prompt.token_ids) - size)
        return min(left, left if self.most is None else self.most), left

    def sample(
        self,
        token_ids: array[int],
        logprobs: array[float],
        finish_reason: str,
        version: int,
        decode: Callable[[Sequence[int]], str],
        experts: torch.Tensor | None = None,
    ) -> Sample:
        """The sample, of which these tokens were sampled now by the weights of `version`.

        `experts` are those of `prefix` and of these tokens but the last. Of earlier pieces, which the engine has not
        read now, none are kept.
        """
        before, segments = self.so_far, [(0, version)]
        if before:
            first = len(before.token_ids)
            segments = [segment for segment in before.segments if segment[0] < first]
            if not segments or (len(token_ids) and segments[-1][1] != version):
                segments.append((first, version))
            token_ids, logprobs = before.token_ids + token_ids, before.logprobs + logprobs
        given, calls, restarts = (before.given, before.calls, before.restarts) if before else ((), (), ())
        if experts is not None and restarts:
            unread = len(self.prompt.token_ids) + restarts[-1]
            experts = torch.nn.functional.pad(experts, (0, 0, 0, 0, unread, 0), value=-1)
        text = decode(without_stop(token_ids, finish_reason))
        columns = self.prompt, self.index, token_ids, logprobs, finish_reason, tuple(segments), text
        return Sample(*columns, experts, given, calls, restarts=restarts, number=self.number)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of completions.

    Attributes:
        max_new_tokens: Longest completion, in tokens.
        stop_ids: A completion ends with the first of these tokens.
        temperature: Logits are divided by it; 0 is greedy.
        top_p: Nucleus sampling; 1 for all tokens.
        top_k: Sample among the k likeliest tokens; 0 for all.
        seed: Seed of the sampling noise, with `draw`.
        draw: Number of the draw in the run: each draw has different noise for the same prompt.
    """

    max_new_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    draw: int = 0

    def greedy(self) -> SamplingParams:
        """A copy with greedy sampling."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=0)


@dataclass(frozen=True)
class Finished:
    """The result of a poll on one rank.

    Attributes:
        samples: Finished samples that this rank alone holds from now on.
        everywhere: Number of samples that this poll finished on all ranks together; the same on every rank.
    """

    samples: list[Sample]
    everywhere: int


def by_prompt(wanted: Sequence[Wanted]) -> list[list[Wanted]]:
    """Splits a list, in which the samples of one prompt are adjacent, into groups that begin with the same tokens."""
    groups: list[list[Wanted]] = []
    for one in wanted:
        last = groups[-1][-1] if groups else None
        # An index that does not rise begins a second group of the same prompt.
        if not last or one.so_far or last.so_far or last.prompt is not one.prompt or last.index >= one.index:
            groups.append([])
        groups[-1].append(one)
    return groups


class Places:
    """Which of several engines generates a sample, by what was submitted: all ranks find the same.

    A sample that goes on stays where a prefix cache has it. The samples of a new prompt go together to the engine that
    was given the fewest.
    """

    def __init__(self, engines: int) -> None:
        """Engines that are idle."""
        self._given, self._engine_of = [0] * engines, dict[int, int]()

    def begin(self) -> None:
        """Notes that all engines are idle."""
        self._given = [0] * len(self._given)

    def forget(self) -> None:
        """Notes that the prefix caches are empty."""
        self._engine_of.clear()

    def place(self, group: Sequence[Wanted]) -> int:
        """The engine of samples that begin with the same tokens, see `by_prompt`."""
        known = self._engine_of.get(group[0].number) if group[0].so_far else None
        engine = self._given.index(min(self._given)) if known is None else known
        self._given[engine] += len(group)
        self._engine_of |= dict.fromkeys((one.number for one in group), engine)
        return engine


def without_stop(tokens: Sequence[int], reason: str) -> Sequence[int]:
    """Tokens of a completion without its stop token, if it ended with one."""
    return tokens[:-1] if reason == "stop" else tokens


def round_robin(items: Sequence[Item], rank: int, ranks: int, distributed: int) -> Sequence[Item]:
    """Items for `rank` of `ranks` in round-robin order, after `distributed` earlier items."""
    return items[(rank - distributed) % ranks :: ranks]


class Sampler(Protocol):
    """The part of `Engine` that a stream of samples calls."""

    @property
    def generates_between_polls(self) -> bool:
        """Whether it generates in separate processes, and so goes on between two polls."""
        ...

    @property
    def busy(self) -> bool:
        """Whether samples are under way: submitted, and neither handed out nor dropped; the same on all ranks."""
        ...

    def submit(self, wanted: Sequence[Wanted], sampling: SamplingParams, version: int) -> None:
        """Starts generating samples, possibly while others are under way.

        Args:
            wanted: The samples; those of one prompt are adjacent.
            sampling: How to sample.
            version: Policy version, which must equal that of the weights; recorded in the samples.
        """
        ...

    def poll(self, interrupted: bool = False) -> Finished:
        """Generates for a while, and hands out finished samples, each once and on one rank alone: its holder.

        The ranks that generate together hold equally many samples. A poll takes `STEPS_PER_POLL` decode steps, or part
        of a second. As long as samples are
        under way every rank must poll, equally often; a rank that does not keeps the others waiting.

        Args:
            interrupted: Whether this rank wants to give up all samples under way; ranks may differ.

        Raises:
            Interrupted: On every rank, when one was interrupted.
            EngineRestarted: An engine was lost; see `EngineRestarted`.
            EngineError: Nothing is under way, or an engine failed.

        After any error all samples under way are dropped; those handed out before are not affected.
        """
        ...


class Engine(Sampler, Protocol):
    """Generates completions with the policy, and hands them out one by one.

    Every rank makes the same calls in the same order, with the same arguments unless a docstring says otherwise.
    All methods raise `contract.EngineError`, and change nothing, when a call is not legal.
    """

    @property
    def experts_of(self) -> range | None:
        """Routed experts whose weights this rank is to push; None for all of them."""
        ...

    @property
    def version(self) -> int | None:
        """Policy version of the engine's weights; None when none were pushed, or they were released."""
        ...

    def scores(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        """Log-prob of every token but the first given those before it, at temperature 1, under each engine's weights.

        Returns:
            Name of the engine, or of one of its copies of the attention layers (data parallel attention) -> log-probs.
        """
        ...

    def begin_update(self) -> None:
        """Opens a session in which all weights are replaced."""
        ...

    def push(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Replaces weights: pairs (Hugging Face name, whole tensor), the same on every rank except for `experts_of`.

        Raises:
            EngineError: No session is open, or a tensor is unknown, was pushed before, or has another shape or dtype
                than the model's; names it.
        """
        ...

    def end_update(self, version: int) -> None:
        """Closes the session: the engine has all weights of this policy version.

        Raises:
            EngineError: A tensor is missing, or the version is older than the one before.
        """
        ...

    def release(self, tags: Collection[str]) -> None:
        """Gives memory of these kinds (`contract.TAGS`) back; weights must be pushed again after `resume`."""
        ...

    def resume(self, tags: Collection[str]) -> None:
        """Takes released memory of these kinds again."""
        ...

    def metrics(self) -> dict[str, float]:
        """Metrics of what was generated since the last call; every rank must call it."""
        ...

    def pids(self) -> list[int]:
        """Processes of the engine on this node, which hold memory of this rank's device."""
        ...

    def close(self) -> None:
        """Ends the engine and its processes."""
        ...
