"""Producer of scored answers: submits samples of prompts to an engine, scores finished ones and announces the scores.

Every rank makes every call. A sample is held and scored by the one rank to which the engine handed it; that rank
announces the answer to all others.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist

from grpo_mega.platform import trace
from grpo_mega.platform.collectives import from_all_ranks
from grpo_mega.rollout.contract import EngineError, EngineRestarted
from grpo_mega.rollout.engine import Engine, SamplingParams, Wanted
from grpo_mega.types import STRETCH, Answer, Group, Prompt, Rollout, Sample, Score

Announcement = tuple[str, int, Answer]
"""(prompt id, index among the prompt's samples, answer) of a sample that a rank holds."""

Refill = Callable[[Sequence[Group]], Sequence[Prompt]]
"""Newly completed groups -> prompts to add because of them; the same on every rank."""


def no_refill(groups: Sequence[Group]) -> Sequence[Prompt]:
    """`Refill` that adds no prompts."""
    return ()


class Pool:
    """`group_size` samples of each prompt that was added; each is first waiting, then in flight, then done.

    The same on every rank: it knows neither engine nor process group, and holds the answers of done samples, not their
    tokens. Samples are numbered from 0, group after group. Those of equal prompts are interchangeable.
    """

    def __init__(self, group_size: int, prompts: Iterable[Prompt] = ()) -> None:
        """Creates a pool in which the samples of `prompts` are waiting."""
        self._group_size = group_size
        self._wanted: list[Wanted] = []  # by number
        self._waiting: list[int] = []  # numbers, ascending
        self._in_flight: defaultdict[tuple[str, int], deque[int]] = defaultdict(deque)  # (prompt id, index) -> numbers
        self._done: dict[int, Answer] = {}
        self._missing: list[int] = []  # number of samples of each group that are not done
        self.add(prompts)

    def add(self, prompts: Iterable[Prompt]) -> None:
        """Adds prompts, with all their samples waiting."""
        for prompt in prompts:
            self._waiting += range(len(self._wanted), len(self._wanted) + self._group_size)
            self._wanted += [Wanted(prompt, index) for index in range(self._group_size)]
            self._missing.append(self._group_size)

    @property
    def waiting(self) -> list[Wanted]:
        """Samples that are waiting, prompt by prompt."""
        return [self._wanted[number] for number in self._waiting]

    @property
    def in_flight(self) -> int:
        """Number of samples in flight."""
        return len(self._wanted) - len(self._waiting) - len(self._done)

    @property
    def done(self) -> int:
        """Number of samples that are done."""
        return len(self._done)

    @property
    def wanted(self) -> int:
        """Number of all samples."""
        return len(self._wanted)

    @property
    def complete(self) -> bool:
        """Whether all samples are done."""
        return self.done == self.wanted

    def begin(self) -> None:
        """Marks all waiting samples as in flight."""
        for number in self._waiting:
            wanted = self._wanted[number]
            self._in_flight[wanted.prompt.id, wanted.index].append(number)
        self._waiting = []

    def take(self, prompt_id: str, index: int, answer: Answer) -> int:
        """Marks a sample of this prompt as done, with its answer.

        Returns:
            The sample's number.

        Raises:
            ValueError: The sample is not in flight; names it.
        """
        numbers = self._in_flight[prompt_id, index]
        if not numbers:
            raise ValueError(
                f"sample {index} of prompt {prompt_id!r} is not in flight: it was never added, or is already done"
            )
        number = numbers.popleft()
        self._done[number] = answer
        self._missing[number // self._group_size] -= 1
        return number

    def lose(self) -> None:
        """Marks all samples in flight as waiting again: the engine has dropped them."""
        lost = [number for numbers in self._in_flight.values() for number in numbers]
        self._in_flight.clear()
        self._waiting = sorted([*self._waiting, *lost])

    def group(self, index: int) -> Group | None:
        """The answers to the prompt with this index in the order of adding; None while one is not done."""
        if index >= len(self._missing) or self._missing[index]:
            return None
        numbers = range(index * self._group_size, (index + 1) * self._group_size)
        return Group(self._wanted[numbers[0]].prompt, tuple(self._done[number] for number in numbers))


class Producer:
    """Turns prompts into scored answers, in the order of the prompts, whichever sample finishes first.

    Samples are scored and announced between two polls; an engine that `generates_between_polls` goes on meanwhile.
    Announced samples are never generated or scored again, also when polls raise in between: after `Interrupted`, or
    after `EngineRestarted` once the weights are pushed, the producer continues with the missing samples. Samples that
    were handed out and not announced yet are announced before `EngineRestarted` is raised; after any other error all
    ranks forget them, and they are missing like those that were never finished.
    """

    def __init__(
        self,
        engine: Engine,
        score: Callable[[Sequence[Sample]], Sequence[Score]],
        group_size: int,
        sampling: SamplingParams,
        version: int,
        at_least: int = 1,
        scoring: Callable[[], AbstractContextManager[object]] = nullcontext,
        refill: Refill = no_refill,
    ) -> None:
        """Creates a producer without prompts.

        Args:
            engine: An engine without samples under way.
            score: Scores samples; called on every rank with the samples it holds, possibly none. When it raises on one
                rank, all ranks raise.
            group_size: Samples per prompt.
            sampling: How to sample.
            version: Policy version; see `Engine.submit`.
            at_least: Smallest number of samples, over all ranks, to score together, unless no more are under way; with
                the number of ranks, most ranks have one to score.
            scoring: Context in which samples are scored and announced, such as a timer.
            refill: Called once with every complete group; returns prompts to add.
        """
        self._engine, self._score, self._scoring, self._refill = engine, score, scoring, refill
        self._sampling, self._version, self._at_least = sampling, version, at_least
        self._group_size = group_size
        self._pool = Pool(group_size)
        self._unscored: list[Sample] = []  # held by this rank
        self._unscored_everywhere = 0
        self._samples: dict[int, Sample] = {}  # held by this rank and announced: number -> sample
        self._handed_out = 0  # number of groups
        self._since: dict[tuple[str, int], int] = {}  # (prompt id, index) -> time of submission, for the trace

    def add(self, prompts: Iterable[Prompt]) -> None:
        """Adds prompts, whose answers follow those of all earlier prompts; also during generation."""
        self._pool.add(prompts)

    @property
    def busy(self) -> bool:
        """Whether answers are missing; the same on all ranks."""
        return not self._pool.complete

    @property
    def progress(self) -> tuple[int, int]:
        """Number of samples that the engine has finished, on all ranks together, and number of all samples."""
        return self._pool.done + self._unscored_everywhere, self._pool.wanted

    def poll(self, interrupted: Callable[[], bool] | None = None) -> Rollout:
        """Polls the engine once, scores and announces due samples, and returns complete groups in order.

        Each group is returned once, when it is complete and the groups of all prompts before it were returned, by this
        poll at the latest. Samples are numbered from 0 in each poll.

        Args:
            interrupted: Whether this rank wants to stop generation; ranks may differ.

        Raises:
            Interrupted: One of the ranks was interrupted.
            EngineRestarted: An engine was lost; push the weights, and poll again.
            EngineError: No answers are missing, or an engine refused or failed.
            RuntimeError: On every rank. Some rank could not score its samples: `score` raised, or did not return one
                score for each. Names the rank and the error.
        """
        self._advance(interrupted)
        return self._take_complete()

    def run(
        self, interrupted: Callable[[], bool] | None = None, tell: Callable[[int, int], None] | None = None
    ) -> Rollout:
        """Polls until no answer is missing; returns all groups not yet returned by `poll`, samples numbered from 0.

        Raises the same errors as `poll`, and can be called again after them. `tell` is called with `progress` before
        every poll.
        """
        while self.busy:
            if tell:
                tell(*self.progress)
            self._advance(interrupted)
        return self._take_complete()

    def _advance(self, interrupted: Callable[[], bool] | None) -> None:
        """Submits waiting samples, polls once, and announces due answers."""
        if self._engine.busy and not self._pool.in_flight:
            raise EngineError("the engine is generating for another caller; poll for its samples, or abort() first")
        if wanted := self._pool.waiting:
            self._engine.submit(wanted, self._sampling, self._version)
            self._pool.begin()
            self._since |= dict.fromkeys(((one.prompt.id, one.index) for one in wanted), trace.now())
        try:
            with trace.span("poll"):
                finished = self._engine.poll(interrupted is not None and interrupted())
            for sample in finished.samples:
                about = {"tokens": len(sample.token_ids), "finish": sample.finish_reason, "version": self._version}
                name = f"{sample.prompt.id} #{sample.index}"
                trace.under_way("sample", name, self._since[sample.prompt.id, sample.index], **about)
            self._unscored += finished.samples
            self._unscored_everywhere += finished.everywhere
            if self._unscored_everywhere >= self._at_least or not self._engine.busy:
                self._announce()
        except EngineRestarted:
            # Every rank raises it in the same poll, so all can still announce what the engines handed out before.
            try:
                self._announce()
            finally:
                self._pool.lose()
            raise
        except BaseException:
            self._unscored, self._unscored_everywhere = [], 0
            self._pool.lose()
            raise

    def _announce(self) -> None:
        """Scores the samples that this rank holds and has not announced, announces their answers, and refills."""
        if not self._unscored_everywhere:
            return
        samples, self._unscored, self._unscored_everywhere = self._unscored, [], 0
        with self._scoring():
            of_all_ranks = from_all_ranks(lambda: self._announcements(samples))
        announced: set[int] = set()  # numbers of groups
        # In the order of ranks everywhere: samples of equal prompts are interchangeable, and get the same numbers.
        for rank, announcements in enumerate(of_all_ranks):
            numbers = [self._pool.take(*announcement) for announcement in announcements]
            announced |= {number // self._group_size for number in numbers}
            if rank == dist.get_rank():
                self._samples |= zip(numbers, samples, strict=True)
        complete = [group for index in sorted(announced) if (group := self._pool.group(index))]
        self.add(self._refill(complete))

    def _announcements(self, samples: Sequence[Sample]) -> list[Announcement]:
        scores = self._score(samples)
        if len(scores) != len(samples):
            raise ValueError(f"the reward returned {len(scores)} scores for {len(samples)} samples")
        holder = dist.get_rank()
        answers = [
            Answer(len(s.token_ids), s.finish_reason, s.segments, score, holder, s.repeated(STRETCH), s.given)
            for s, score in zip(samples, scores, strict=True)
        ]
        return [(s.prompt.id, s.index, answer) for s, answer in zip(samples, answers, strict=True)]

    def _take_complete(self) -> Rollout:
        """Complete groups not returned before, up to the first incomplete one."""
        groups: list[Group] = []
        first = self._handed_out * self._group_size
        while group := self._pool.group(self._handed_out):
            groups.append(group)
            self._handed_out += 1
        held = sorted(number for number in self._samples if number < self._handed_out * self._group_size)
        return Rollout(groups, {number - first: self._samples.pop(number) for number in held})


def generate(
    engine: Engine,
    prompts: Sequence[Prompt],
    group_size: int,
    sampling: SamplingParams,
    version: int,
    interrupted: Callable[[], bool] | None = None,
) -> list[Sample]:
    """Generates `group_size` samples of every prompt, in order, all on every rank: for small numbers of samples.

    Args:
        engine: An engine without samples under way.
        prompts: The prompts to complete.
        group_size: Samples per prompt.
        sampling: How to sample.
        version: Policy version; see `Engine.submit`.
        interrupted: Whether this rank wants to stop generation; called before every poll.

    Raises:
        Interrupted: One of the ranks was interrupted.
        EngineRestarted: An engine was lost; push the weights, and call this again.
        EngineError: An engine refused or failed.
    """

    def zeros(samples: Sequence[Sample]) -> list[Score]:
        return [Score(0.0, {})] * len(samples)

    producer = Producer(engine, zeros, group_size, sampling, version, len(prompts) * group_size)
    producer.add(prompts)
    held = producer.run(interrupted).samples
    samples = {number: sample for of_rank in from_all_ranks(lambda: held) for number, sample in of_rank.items()}
    return [samples[number] for number in sorted(samples)]
