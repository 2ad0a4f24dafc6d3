"""Steps with completions that outlive them: the trainer's own `Stream` and `Slices`, with engines that only take time.

The samples have lengths, but no tokens. So which groups a step takes, how old their tokens are and what waits for later
steps is not modelled, but done as in a run (`rollout/stream.py`); the seconds are those of `generation.py`.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice, pairwise
from statistics import NormalDist
from typing import Any

from grpo_mega.forecast.planning.generation import EngineSet, Generated, SimulatedEngine
from grpo_mega.rollout.engine import SLICE, Finished, Places, SamplingParams, Wanted, by_prompt
from grpo_mega.rollout.stream import Slices, Stream
from grpo_mega.types import Group, Prompt, Sample, Score

ALIKE = 0.5
"""Assumed correlation of the lengths of a group: some problems need long completions, whoever answers."""
SAMPLES = 2048
"""Samples of a step that are simulated. Where there are more, some of the engines stand for all, which are alike."""
MEASURED = 8
"""Steps that are averaged, after twice as many slices as the longest completion takes."""


@dataclass(frozen=True)
class Lengths:
    """Lengths of completions, which are the same whenever they are drawn.

    Attributes:
        table: Lengths that are equally likely, ascending.
        alike: How much the completions of one prompt resemble each other: from 0, not more than others, to 1, all have
            the same length. It is the correlation of their normal scores.
    """

    table: Sequence[int]
    alike: float = ALIKE

    @property
    def mean(self) -> float:
        """Mean length."""
        return sum(self.table) / len(self.table)

    def group(self, number: int, size: int) -> list[int]:
        """Lengths of the completions of prompt `number`.

        Prompts in a row are spread evenly over all kinds by steps of the golden ratio, so that few steps are enough for
        a mean.
        """
        normal, noise = NormalDist(), random.Random(number)
        prompt = normal.inv_cdf((number + 0.5) * (math.sqrt(5) - 1) / 2 % 1)
        scores = (math.sqrt(self.alike) * prompt + math.sqrt(1 - self.alike) * noise.gauss(0, 1) for _ in range(size))
        return [self.table[min(int(normal.cdf(score) * len(self.table)), len(self.table) - 1)] for score in scores]


class _Uncounted(Sample):
    """A sample without tokens."""

    def repeated(self, size: int) -> float:
        """0: nothing repeats."""
        return 0.0


@dataclass(frozen=True)
class _Blank:
    """Tokens, or log-probs, of which only the number is kept."""

    size: int

    def __len__(self) -> int:
        return self.size

    def __add__(self, other: _Blank) -> _Blank:
        return _Blank(self.size + other.size)

    def __getitem__(self, part: slice) -> _Blank:
        return _Blank(len(range(self.size)[part]))


class SimulatedEngines:
    """`Sampler` whose samples have the lengths that their prompt's metadata give.

    Attributes:
        slowest: Of each slice, the outcome of the engine that ended last: the others wait for it.
        sampled: Tokens sampled by all engines.
        evicted: Times that a sequence lost its cache to others.
    """

    generates_between_polls = False

    def __init__(self, engines: EngineSet, one_by_one: bool = True) -> None:
        """Engines without samples under way. A poll takes until a sample has ended; without `one_by_one` until all
        have, which is faster where none follows on another."""
        self._set, self._longest, self._version = engines, 0, 0
        self._one_by_one = one_by_one
        self._places = Places(engines.count)
        # Number of the engine, and of the sequence in it -> its sample.
        self._under_way: dict[tuple[int, int], Wanted] = {}
        self.slowest: list[Generated] = []
        self.sampled = self.evicted = 0
        self._begin_slice()

    def _begin_slice(self) -> None:
        self._now, one = 0.0, self._set
        self._engines = [SimulatedEngine(one.decoder, one.prompt, one.room, one.most) for _ in range(one.count)]

    def end_slice(self) -> None:
        """Notes what the slice took; must be called when all its samples have been handed out."""
        outcomes = [engine.result for engine in self._engines]
        self.slowest.append(max(outcomes, key=lambda outcome: outcome.seconds))
        self.sampled += sum(outcome.tokens for outcome in outcomes)
        self.evicted += sum(outcome.evicted for outcome in outcomes)
        self._begin_slice()

    @property
    def busy(self) -> bool:
        """Whether samples are under way."""
        return bool(self._under_way)

    def submit(self, wanted: Sequence[Wanted], sampling: SamplingParams, version: int) -> None:
        """Deals groups to the engines, as `SGLangEngine.submit` does."""
        if not self.busy:
            self._places.begin()
        if version != self._version:
            self._places.forget()
        self._version, self._longest = version, sampling.max_new_tokens
        for group in by_prompt(wanted):
            number = self._places.place(group)
            engine = self._engines[number]
            if not engine.busy:
                # It has waited for this sample.
                engine.result.seconds = max(engine.result.seconds, self._now)
            for one in group:
                end = min(_length(one), _begun(one) + one.limits(self._longest, sys.maxsize)[0])
                self._under_way[number, engine.submit(end, _begun(one))] = one

    def poll(self, interrupted: bool = False) -> Finished:
        """Lets the engine that is behind all others generate until a sample of it ends, or all until all have."""
        samples: list[Sample] = []
        while self.busy and not (samples and self._one_by_one):
            at_work = [number for number, engine in enumerate(self._engines) if engine.busy]
            number = min(at_work, key=lambda number: self._engines[number].result.seconds)
            engine = self._engines[number]
            for ended in engine.next_ended():
                one, end = self._under_way.pop((number, ended)), engine.lengths[ended]
                reason = SLICE if end < _length(one) else "length" if end == self._longest else "stop"
                blank: Any = _Blank(end - _begun(one))
                samples.append(_Uncounted(**vars(one.sample(blank, blank, reason, self._version, lambda _: ""))))
            self._now = engine.result.seconds
        return Finished(samples, len(samples))


def _length(one: Wanted) -> int:
    return one.prompt.metadata["lengths"][one.index]


def _begun(one: Wanted) -> int:
    return len(one.so_far.token_ids) if one.so_far else 0


@dataclass(frozen=True)
class SimulatedStep:
    """A step.

    Attributes:
        slices: Outcomes of its slices, each of the engine that ended last.
        sampled: Tokens that its slices sampled.
        evicted: Times that a sequence lost its cache.
        lengths: Lengths of the completions that it learns from.
        ages: {steps between the weights that sampled a token and those that learn from it: number of tokens}.
        in_flight: Samples that wait for a later step.
    """

    slices: list[Generated]
    sampled: int
    evicted: int
    lengths: list[int]
    ages: dict[int, int]
    in_flight: int

    @property
    def seconds(self) -> float:
        """Seconds of generation."""
        return sum(outcome.seconds for outcome in self.slices)


def steps(
    engines: EngineSet, lengths: Lengths, slices: Slices, group_size: int, longest: int, drawn: int
) -> Iterator[SimulatedStep]:
    """Endless steps from the first on, each of which takes `drawn` groups, with completions of up to `longest` tokens.

    Raises:
        InputError: The caches have no room for the longest sequence.
    """

    def zeros(samples: Sequence[Sample]) -> list[Score]:
        return [Score(0.0, {})] * len(samples)

    def enough(groups: list[Group]) -> int | None:
        return drawn if len(groups) >= drawn else None

    made = SimulatedEngines(engines, one_by_one=slices.reserve > 0)
    # Announced at once, as samples of the reserve wait for those that end.
    stream = Stream(made, zeros, group_size, 1 if slices.reserve else sys.maxsize, gather=lambda announce: [announce()])
    sampling = SamplingParams(longest, ())
    prompts = (Prompt(f"{n}", (), "", "", "", {"lengths": lengths.group(n, group_size)}) for n in count())

    def take(number: int) -> list[Prompt]:
        return [*islice(prompts, number)]

    for step in count():
        before, sampled, evicted = len(made.slowest), made.sampled, made.evicted

        def advance() -> None:
            stream.advance(sampling, step, slices.tokens)  # noqa: B023 (called in this step)
            made.end_slice()

        rollout = stream.step(slices, take, enough, advance)
        if slices.ahead:
            stream.fill(slices, take, enough)
            advance()
        ages: dict[int, int] = {}
        for info in rollout.infos:
            for (first, version), (end, _) in pairwise((*info.segments, (info.length, 0))):
                ages[step - version] = ages.get(step - version, 0) + end - first
        yield SimulatedStep(
            made.slowest[before:],
            made.sampled - sampled,
            made.evicted - evicted,
            [info.length for info in rollout.infos],
            ages,
            len(stream.state_dict().groups) * group_size,
        )


@dataclass(frozen=True)
class Steady:
    """Generation in the steady state.

    Attributes:
        seconds: Seconds of generation in a step.
        reading: Those in which engines read prompts and what is generated already.
        tokens: Tokens that a step samples.
        age: Mean number of steps by which the weights that sampled a token are older than those that learn from it.
        oldest: The largest, also of the first steps.
        first: Mean length of the completions that the first step learns from.
        length: The same in the steady state.
        in_flight: Samples that wait for a later step.
        evicted: Sequences that lose their cache in a step.
        most: Most sequences that run at once in an engine.
        slices: Slices of a step.
    """

    seconds: float
    reading: float
    tokens: float
    age: float
    oldest: int
    first: float
    length: float
    in_flight: float
    evicted: float
    most: int
    slices: float


def steady(
    engines: EngineSet,
    lengths: Lengths,
    slices: Slices,
    group_size: int,
    longest: int,
    drawn: int,
    measured: int = MEASURED,
) -> Steady:
    """Means over `measured` steps in the steady state; see `steps`."""
    # Some of the engines, with their part of the groups. Without slices all: a step waits for the slowest.
    part = min(1.0, SAMPLES / (drawn * group_size)) if slices.tokens else 1.0
    fewer = replace(engines, count=max(1, round(part * engines.count)))
    share = fewer.count / engines.count
    of_part = replace(
        slices,
        in_flight=max(1, round(share * slices.in_flight)),
        reserve=round(share * slices.reserve),
        per_step=max(1, round(share * slices.per_step)),
    )
    taken = max(1, round(share * drawn))
    run = steps(fewer, lengths, of_part, group_size, longest, taken)
    # The age of tokens is steady after about two times the slices of the longest completion.
    early, warm_up = [next(run)], 2 * -(-longest // slices.tokens) if slices.tokens else 1
    while sum(len(step.slices) for step in early) < warm_up:
        early.append(next(run))
    late = [*islice(run, measured)]
    # A step may sample nothing: its groups were complete before it.
    while not any(step.sampled for step in late):
        late.append(next(run))
    outcomes = [outcome for step in late for outcome in step.slices]
    ages = {age: sum(step.ages.get(age, 0) for step in late) for step in late for age in step.ages}
    trained = [length for step in late for length in step.lengths]
    # What is in flight may grow or shrink a little in a few steps, so that they sample more or less than they train.
    tokens = lengths.mean * group_size * drawn
    scale = share * tokens / sum(step.sampled for step in late)
    return Steady(
        seconds=scale * sum(step.seconds for step in late),
        reading=scale * engines.decoder.prompt_token * sum(outcome.read for outcome in outcomes),
        tokens=tokens,
        age=sum(age * size for age, size in ages.items()) / sum(ages.values()),
        oldest=max(max(step.ages) for step in early + late),
        first=sum(early[0].lengths) / len(early[0].lengths),
        length=sum(trained) / len(trained),
        in_flight=sum(step.in_flight for step in late) / len(late) / share,
        evicted=scale * sum(step.evicted for step in late) / share,
        most=max(outcome.most for outcome in outcomes),
        slices=len(outcomes) / len(late),
    )
