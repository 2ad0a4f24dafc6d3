"""Stream of scored samples: submits samples to an engine, scores those that finish, and announces what came of them.

The stream advances in slices. In a slice every unfinished sample gets at most so many more tokens, from one version of
the weights; what is unfinished then goes on in the next slice, under the weights of that time. So the version that
samples a token follows from its position alone, and not from clocks, layouts or machines. Without a limit the slice
ends with the longest sample, and nothing outlives it.

With a reserve, samples also begin within a slice. Every sample has a seat, in which one after the other is generated:
when one ends after t tokens of the slice, the next one has those that are left. So seats count time in tokens too.

Every rank makes every call. A finished sample is held and scored by the one rank to which the engine handed it; that
rank announces its info to all others. An unfinished sample is announced whole, since any rank may go on with it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Protocol

from grpo_mega.config.schema import RolloutConfig
from grpo_mega.platform import trace
from grpo_mega.platform.collectives import from_all_ranks
from grpo_mega.platform.stop import Interrupted
from grpo_mega.rollout.contract import EngineError, EngineRestarted
from grpo_mega.rollout.engine import TURN, UNFINISHED, Sampler, SamplingParams, Wanted
from grpo_mega.types import (
    NOBODY,
    STRETCH,
    Group,
    GroupInFlight,
    Prompt,
    Rollout,
    Sample,
    SampleInfo,
    Score,
    StreamState,
)

SECONDS_PER_WAIT = 0.25
"""Longest wait for replies while an engine has nothing to do, between two looks at whether the run is to stop."""

Announcement = tuple[int, SampleInfo | Sample]
"""(number of a sample, its info or, if it is unfinished, the sample itself)."""

Gather = Callable[[Callable[[], list[Announcement]]], list[list[Announcement]]]
"""This rank's announcements -> those of every rank, by rank; the same on every rank."""

Refill = Callable[[Sequence[Group]], Sequence[Prompt]]
"""Newly completed groups -> prompts to add because of them; the same on every rank."""


class Replying(Protocol):
    """What replies to samples that ended with a call, which then go on."""

    def go_on(self, samples: Sequence[Sample], longest: int, wait: float | None) -> Sequence[Sample]:
        """Samples that this rank holds from now on, of which some go on (`TURN`); every rank must call it.

        Args:
            samples: What the engine has finished on this rank.
            longest: Largest number of tokens that a sample may sample.
            wait: Seconds to wait for a reply, if none has come; samples whose replies are missing come with a later
                call. None to wait for all replies.
        """
        ...

    def forget(self) -> None:
        """Drops the samples whose replies are missing: they will be generated again."""
        ...


def no_refill(groups: Sequence[Group]) -> Sequence[Prompt]:
    """`Refill` that adds no prompts."""
    return ()


@dataclass(frozen=True)
class Slices:
    """The slices in which the samples of steps are generated.

    Attributes:
        tokens: Largest number of tokens that a slice samples of each sample; None for whole samples, of which none
            outlives its step.
        in_flight: Number of groups whose samples a slice generates at once: prompts are added as long as
            the unfinished samples stay within those of that many groups, and of the reserve.
        order: Order in which steps take complete groups; see `Stream.ready`.
        per_step: Number of groups that a step takes at least.
        ahead: Whether the slice of a step is generated during the updates of the step before.
        reserve: Number of further groups, whose samples begin where others have ended.
    """

    tokens: int | None
    in_flight: int
    order: str
    per_step: int
    ahead: bool = False
    reserve: int = 0

    @property
    def outlive_steps(self) -> bool:
        """Whether samples may wait for a later step than the one in which they began."""
        return self.tokens is not None or self.ahead

    def most_steps_late(self, longest: int, refilled: bool = True) -> int:
        """Bound on the number of steps between the first token of a sample and the step that learns from it, for
        samples of at most `longest` tokens; `refilled` says whether a step may take more groups than `per_step`.

        A group is complete within ceil(queue * longest / tokens) slices, where `queue` is the largest number of samples
        of a seat; every step has a slice, and a slice adds at most `in_flight + reserve` groups. So there are at most
        that product of incomplete groups, or of groups after the oldest incomplete one. Prompts are added only while
        the complete groups are not enough for a step, which then takes all of them; it and those after it take at least
        `per_step` each. In the order "finished" a group may be almost complete when others come that are complete
        before it. A slice that is generated ahead comes a step earlier.

        If a slice adds just the groups that its step takes, and completes them, none is left over.
        """
        groups = self.in_flight + self.reserve
        queue = -(-groups // self.in_flight)
        slices = -(-queue * longest // self.tokens) if self.tokens else 1
        if slices == 1 and groups == self.per_step and not refilled:
            return int(self.ahead)
        steps_to_take_all = -(-(slices * groups - 1) // self.per_step)
        return steps_to_take_all + (slices - 1 if self.order == "finished" else 0) + self.ahead


def slices_of(rollout: RolloutConfig, per_step: int) -> Slices:
    """The slices of a run whose steps have `per_step` prompts (`algorithm.prompts_per_step`)."""
    in_flight = rollout.in_flight or per_step
    return Slices(rollout.slice_tokens, in_flight, rollout.order, per_step, rollout.ahead, rollout.reserve)


class Stream:
    """Groups of samples under way, which may outlive a step.

    Groups are numbered from 0 in the order of submission, samples group after group. Samples are scored and announced
    between two polls; an engine that `generates_between_polls` goes on meanwhile. Announced samples are never scored
    again, nor are their tokens generated again in this slice, also when polls raise in between: after `Interrupted`, or
    after `EngineRestarted` once the weights are pushed, `advance` continues the slice with the missing samples. Samples
    that were handed out and not announced yet are announced before `EngineRestarted` is raised; after any other error
    all ranks forget them, and they are missing like those that were never handed out.

    Attributes:
        in_slice: Whether an error ended `advance` within a slice, which the next call continues.
    """

    def __init__(
        self,
        engine: Sampler,
        score: Callable[[Sequence[Sample]], Sequence[Score]],
        group_size: int,
        at_least: int = 1,
        scoring: Callable[[], AbstractContextManager[object]] = nullcontext,
        replying: Replying | None = None,
        gather: Gather = from_all_ranks,
    ) -> None:
        """Creates an empty stream.

        Args:
            engine: An engine without samples under way.
            score: Scores samples; called on every rank with the samples it holds, possibly none. When it raises on one
                rank, all ranks raise.
            group_size: Samples per prompt.
            at_least: Smallest number of samples, over all ranks, to score together, unless no more are under way; with
                the number of ranks, most ranks have one to score.
            scoring: Context in which samples are scored and announced, such as a timer.
            replying: Lets an environment reply. An engine that generates between polls does not wait for the replies.
            gather: Makes the announcements of every rank known to all; simulations have one rank and no process group.
        """
        self._engine, self._score, self._scoring, self._gather = engine, score, scoring, gather
        self._replying = replying
        self._group_size, self._at_least = group_size, at_least
        self._state = StreamState()
        self._begin_between_slices()

    def _begin_between_slices(self) -> None:
        self.in_slice = False
        # Numbers of the samples that the slice is yet to submit, and of those under way -> time of submission.
        self._due: list[int] = []
        self._under_way: dict[int, int] = {}
        self._of_slice = 0
        # Tokens that each sample had sampled when the slice began, if any, and tokens of the slice that its seat had
        # sampled when it began, if it began within the slice.
        self._before: dict[int, int] = {}
        self._late: dict[int, int] = {}
        # Sample -> the next one of its seat.
        self._next: dict[int, int] = {}
        self._unscored: list[Sample] = []  # held by this rank
        self._unscored_everywhere = 0

    def add(self, prompts: Iterable[Prompt], draw: int | None = None, seats: Sequence[int] = ()) -> None:
        """Adds prompts, with the noise of `draw` (None for that of the sampling parameters). Their samples begin with
        the next slice, or join the one in progress; with `seats`, each when those before it in its seat have ended."""
        for prompt in prompts:
            first, size = self._state.submitted * self._group_size, self._group_size
            group = GroupInFlight(prompt, draw, [None] * size, [None] * size, [*seats])
            self._state.groups[self._state.submitted] = group
            self._state.submitted += 1
            if self.in_slice:
                self._due += range(first, first + size)
                self._of_slice += size

    @property
    def submitted(self) -> int:
        """Number of groups added so far."""
        return self._state.submitted

    @property
    def complete(self) -> dict[int, Group]:
        """Number -> complete group, in the order of submission; those that were taken are gone."""
        return {number: _complete(group) for number, group in self._state.groups.items() if None not in group.infos}

    def ready(self, order: str) -> list[int]:
        """Numbers of the complete groups that a step may take, in the order in which it takes them.

        "finished" is the order of completion, by slices, and of submission within a slice. "submitted" is that of
        submission, up to the first group that is not complete.
        """
        groups, complete = self._state.groups, self.complete
        if order == "submitted":
            return [*takewhile(complete.__contains__, groups)]
        return sorted(complete, key=lambda number: (groups[number].completed, number))

    @property
    def unfinished(self) -> int:
        """Number of samples that are not finished."""
        return len(self._unfinished_samples())

    def advance(
        self,
        sampling: SamplingParams,
        version: int,
        most: int | None = None,
        interrupted: Callable[[], bool] | None = None,
        tell: Callable[[int, int], None] | None = None,
        refill: Refill = no_refill,
        wait: bool = True,
    ) -> None:
        """Generates a slice: every unfinished sample until it is finished, or has `most` more tokens.

        Args:
            sampling: How to sample.
            version: Policy version; see `Engine.submit`.
            most: Largest number of tokens that the slice samples of each sample; None for no limit.
            interrupted: Whether this rank wants to stop generation; ranks may differ.
            tell: Called before every poll with the number of samples that the slice is done with, and of all of them.
            refill: Called once with every group that is completed; returns prompts to add to the slice.
            wait: Without, an engine that generates between polls only begins; the next call continues the slice.

        Raises:
            Interrupted: One of the ranks was interrupted.
            EngineRestarted: An engine was lost; push the weights, and call this again.
            EngineError: An engine refused or failed.
            RuntimeError: On every rank. Some rank could not score its samples: `score` raised, or did not return one
                score for each. Names the rank and the error.
        """
        if not self.in_slice:
            self._begin_slice()
        if not wait and self._engine.generates_between_polls:
            self._submit(sampling, version, most)
            return
        with trace.span("slice", number=self._state.slices, version=version) if most else nullcontext():
            while self._due or self._under_way:
                if tell:
                    missing = len(self._due) + len(self._under_way) - self._unscored_everywhere
                    tell(self._of_slice - missing, self._of_slice)
                self._poll(sampling, version, most, interrupted, refill)
        self.in_slice = False

    def step(
        self,
        slices: Slices,
        take: Callable[[int], list[Prompt]],
        enough: Callable[[list[Group]], int | None],
        advance: Callable[[], None],
    ) -> Rollout:
        """Takes the groups of a step, after as many slices as are needed until enough are complete.

        There is at least one slice, so that samples get older only as they grow; where slices are generated ahead it
        was that of the step before.

        Args:
            slices: The slices.
            take: Gives the next n prompts.
            enough: Complete groups in their order -> how many of the first the step takes; None while too few are
                complete.
            advance: Generates a slice, by `Stream.advance` with the arguments of this step.

        Raises the errors of `advance`; after `EngineRestarted` it can be called again, and continues.
        """
        count = enough(self._ready_groups(slices)) if slices.ahead else None
        while count is None or self.in_slice:
            self.fill(slices, take, enough)
            advance()
            count = enough(self._ready_groups(slices))
        return self.take(self.ready(slices.order)[:count])

    def fill(
        self, slices: Slices, take: Callable[[int], list[Prompt]], enough: Callable[[list[Group]], int | None]
    ) -> None:
        """Fills the stream up with prompts for the next slice, unless enough groups for the next step are complete; see
        `step`. Does nothing within a slice, which has got its prompts."""
        if self.in_slice or enough(self._ready_groups(slices)) is not None:
            return
        size, unfinished = self._group_size, self._unfinished_samples()
        waiting = Counter(map(self._seat_of, unfinished))
        # (number of its unfinished samples, seat): a sorted list is a heap.
        shortest = sorted((waiting[seat], seat) for seat in range(slices.in_flight * size))
        for prompt in take(((slices.in_flight + slices.reserve) * size - len(unfinished)) // size):
            seats: list[int] = []
            while slices.reserve and len(seats) < size:
                length, seat = shortest[0]
                heapq.heapreplace(shortest, (length + 1, seat))
                seats.append(seat)
            # The draw of the step to which the prompt would belong if no sample outlived a step.
            self.add([prompt], self.submitted // slices.per_step if slices.outlive_steps else None, seats)

    def _ready_groups(self, slices: Slices) -> list[Group]:
        complete = self.complete
        return [complete[number] for number in self.ready(slices.order)]

    def take(self, numbers: Iterable[int] | None = None) -> Rollout:
        """Takes complete groups out, by default all, and returns them in this order with their samples, numbered anew
        from 0."""
        numbers = [*(self.complete if numbers is None else numbers)]
        groups = [_complete(self._state.groups.pop(number)) for number in numbers]
        size, held = self._group_size, self._state.samples
        samples = {
            at * size + index: held.pop(number * size + index)
            for at, number in enumerate(numbers)
            for index in range(size)
            if number * size + index in held
        }
        return Rollout(groups, samples)

    def state_dict(self) -> StreamState:
        """A copy of the state between two slices; `checkpoint/in_flight.py` writes it into a checkpoint."""
        assert not self.in_slice, "within a slice some samples are ahead of others"
        return self._state.copy()

    def load_state_dict(self, state: StreamState) -> None:
        """Restores a state of `state_dict`; a slice that was interrupted is as if it had not begun."""
        self._state = state.copy()
        self._begin_between_slices()

    def _begin_slice(self) -> None:
        """The first unfinished sample of every seat is due."""
        self.in_slice = True
        self._state.slices += 1
        self._late, self._next = {}, {}
        last_of: dict[int, int] = {}
        for number in self._unfinished_samples():
            seat = self._seat_of(number)
            if seat in last_of:
                self._next[last_of[seat]] = number
            else:
                self._due.append(number)
            if seat is not None:
                last_of[seat] = number
        self._of_slice = len(self._due)
        self._before = {number: self._sampled(number) for number in self._due}

    def _seat_of(self, number: int) -> int | None:
        """The seat of a sample; None without a reserve, where each has one to itself."""
        group, index = self._group_of(number)
        return group.seats[index] if group.seats else None

    def _unfinished_samples(self) -> list[int]:
        size = self._group_size
        return [
            number * size + index
            for number, group in self._state.groups.items()
            for index, info in enumerate(group.infos)
            if info is None
        ]

    def _poll(
        self,
        sampling: SamplingParams,
        version: int,
        most: int | None,
        interrupted: Callable[[], bool] | None,
        refill: Refill,
    ) -> None:
        """Submits due samples, polls once, and announces samples."""
        self._submit(sampling, version, most)
        try:
            replies_only = not self._engine.busy and self._unscored_everywhere > 0
            if replies_only:
                if any(from_all_ranks(lambda: interrupted is not None and interrupted())):
                    raise Interrupted
            else:
                with trace.span("poll"):
                    finished = self._engine.poll(interrupted is not None and interrupted())
                for sample in finished.samples:
                    about = {"tokens": len(sample.token_ids), "finish": sample.finish_reason, "version": version}
                    name = f"{sample.prompt.id} #{sample.index}"
                    trace.under_way("sample", name, self._under_way[sample.number], **about)
                self._unscored += finished.samples
                self._unscored_everywhere += finished.everywhere
            if self._unscored_everywhere >= self._at_least or not self._engine.busy:
                self._announce(sampling, most, refill)
        except EngineRestarted:
            # Every rank raises it in the same poll, so all can still announce what the engines handed out before.
            try:
                self._announce(sampling, most, refill)
            finally:
                self._lose()
            raise
        except BaseException:
            self._lose()
            raise

    def _submit(self, sampling: SamplingParams, version: int, most: int | None) -> None:
        """Submits the samples that are due."""
        if self._engine.busy and not self._under_way:
            raise EngineError("the engine is generating for another caller; poll for its samples first")
        # In order, whichever ranks held the samples that a reply continues: a batch in another order rounds otherwise.
        wanted = []
        for number in sorted(self._due):
            group, index = self._group_of(number)
            left = most and most - self._used(number, self._sampled(number))
            wanted.append(Wanted(group.prompt, index, group.so_far[index], left, group.draw, number))
        # Apart: the embedded engine makes its waves for the largest group of a submission, and samples that go on are
        # groups of one.
        for part in ([one for one in wanted if one.so_far], [one for one in wanted if not one.so_far]):
            if part:
                self._engine.submit(part, sampling, version)
        self._under_way |= dict.fromkeys(self._due, trace.now())
        self._due = []

    def _sampled(self, number: int) -> int:
        """Number of tokens that a sample has sampled so far."""
        group, index = self._group_of(number)
        so_far = group.so_far[index]
        return so_far.sampled if so_far else 0

    def _used(self, number: int, sampled: int) -> int:
        """Tokens of the slice that the seat of a sample has sampled, when the sample has sampled so many in all."""
        return self._late.get(number, 0) + sampled - self._before.get(number, 0)

    def _group_of(self, number: int) -> tuple[GroupInFlight, int]:
        """The group of a sample, and the sample's index in it."""
        return self._state.groups[number // self._group_size], number % self._group_size

    def _lose(self) -> None:
        """Makes all samples under way due again: the engine has dropped them."""
        self._due = sorted([*self._due, *self._under_way])
        self._under_way = {}
        self._unscored, self._unscored_everywhere = [], 0
        if self._replying:
            self._replying.forget()

    def _announce(self, sampling: SamplingParams, most: int | None, refill: Refill) -> None:
        """Scores the finished samples that this rank holds and has not announced, announces all, and refills."""
        if not self._unscored_everywhere:
            return
        samples, self._unscored = self._unscored, []
        wait = (0.0 if self._engine.busy else SECONDS_PER_WAIT) if self._engine.generates_between_polls else None

        def announcements() -> list[Announcement]:
            if self._replying:
                samples[:] = self._replying.go_on(samples, sampling.max_new_tokens, wait)
            finished = [sample for sample in samples if sample.finish_reason not in UNFINISHED]
            scores = self._score(finished)
            if len(scores) != len(finished):
                raise ValueError(f"the reward returned {len(scores)} scores for {len(finished)} samples")
            infos: list[Announcement] = [(s.number, _info(s, x)) for s, x in zip(finished, scores, strict=True)]
            # The next engine to read an unfinished sample chooses its experts anew. They would be most of a message.
            return infos + [(s.number, replace(s, experts=None)) for s in samples if s.finish_reason in UNFINISHED]

        with self._scoring():
            of_all_ranks = self._gather(announcements)
        self._state.samples |= {sample.number: sample for sample in samples if sample.finish_reason not in UNFINISHED}
        completed: dict[int, Group] = {}
        announced = [(holder, *one) for holder, of_rank in enumerate(of_all_ranks) for one in of_rank]
        self._unscored_everywhere -= len(announced)
        for holder, number, outcome in announced:
            del self._under_way[number]
            group, index = self._group_of(number)
            if isinstance(outcome, Sample):
                # It arrived with a copy of its prompt. Its text is decoded anew with its next tokens.
                group.so_far[index] = replace(outcome, prompt=group.prompt, text="")
                # A reply ends no slice.
                left = most is None or self._used(number, self._sampled(number)) < most
                if left and outcome.finish_reason == TURN:
                    self._due.append(number)
                continue
            group.so_far[index], group.infos[index] = None, replace(outcome, holder=holder)
            used = self._used(number, outcome.sampled)
            if (following := self._next.get(number)) is not None and (most is None or used < most):
                self._late[following] = used
                self._due.append(following)
                self._of_slice += 1
            if None not in group.infos:
                group.completed = self._state.slices
                completed[number // self._group_size] = _complete(group)
        self.add(refill([completed[number] for number in sorted(completed)]))


def _info(sample: Sample, score: Score) -> SampleInfo:
    repeated, errors = sample.repeated(STRETCH), sum(call.error for call in sample.calls)
    length, reason, calls = len(sample.token_ids), sample.finish_reason, len(sample.calls)
    known = length, reason, sample.segments, score, NOBODY, repeated, sample.given, calls, errors
    return SampleInfo(*known, sample.restarts)


def _complete(group: GroupInFlight) -> Group:
    infos = tuple(info for info in group.infos if info)
    assert len(infos) == len(group.infos), "the group is complete"
    return Group(group.prompt, infos)


def generate(
    engine: Sampler,
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

    stream = Stream(engine, zeros, group_size, len(prompts) * group_size)
    stream.add(prompts)
    stream.advance(sampling, version, interrupted=interrupted)
    held = stream.take().samples
    samples = {number: sample for of_rank in from_all_ranks(lambda: held) for number, sample in of_rank.items()}
    return [samples[number] for number in sorted(samples)]
