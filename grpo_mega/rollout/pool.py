"""Which samples of which prompts are waiting, in flight and done: bookkeeping alone, no engine and no process group."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from grpo_mega.types import Prompt, Sample

Wanted = tuple[Prompt, int]
"""A sample that is to be generated: its prompt, and which of the prompt's samples it is."""


class Pool:
    """`group_size` samples of each prompt that was added, from waiting over in flight to done.

    Prompts may be equal; their samples are interchangeable then.
    """

    def __init__(self, group_size: int, prompts: Iterable[Prompt] = ()) -> None:
        """Samples of `prompts` are waiting."""
        self._group_size = group_size
        self._wanted: list[Wanted] = []  # by place: group after group
        self._waiting: list[int] = []  # places, ascending
        self._in_flight: defaultdict[tuple[str, int], deque[int]] = defaultdict(deque)  # (prompt id, index) -> places
        self._done: dict[int, Sample] = {}
        self._missing: list[int] = []  # samples of each group that are not done
        self.add(prompts)

    def add(self, prompts: Iterable[Prompt]) -> None:
        """More prompts, whose samples are waiting."""
        for prompt in prompts:
            self._waiting += range(len(self._wanted), len(self._wanted) + self._group_size)
            self._wanted += [(prompt, index) for index in range(self._group_size)]
            self._missing.append(self._group_size)

    @property
    def waiting(self) -> list[Wanted]:
        """The samples that nobody generates, prompt by prompt."""
        return [self._wanted[place] for place in self._waiting]

    @property
    def in_flight(self) -> int:
        """How many samples are being generated."""
        return len(self._wanted) - len(self._waiting) - len(self._done)

    @property
    def done(self) -> int:
        """How many samples are done."""
        return len(self._done)

    @property
    def complete(self) -> bool:
        """Whether all samples are done."""
        return self.done == len(self._wanted)

    def begin(self) -> None:
        """All that is waiting is generated from now on."""
        for place in self._waiting:
            prompt, index = self._wanted[place]
            self._in_flight[prompt.id, index].append(place)
        self._waiting = []

    def take(self, samples: Sequence[Sample]) -> list[int]:
        """These samples are done; numbers of the groups that are complete by them, ascending.

        Raises:
            ValueError: A sample is not in flight; names it.
        """
        completed = []
        for sample in samples:
            places = self._in_flight[sample.prompt.id, sample.index]
            if not places:
                raise ValueError(
                    f"sample {sample.index} of prompt {sample.prompt.id!r} is not in flight: it was not asked for, or "
                    "came before"
                )
            place = places.popleft()
            self._done[place] = sample
            group = place // self._group_size
            self._missing[group] -= 1
            if not self._missing[group]:
                completed.append(group)
        return sorted(completed)

    def lose(self) -> None:
        """All that is in flight is waiting again: the engine has dropped it."""
        lost = [place for places in self._in_flight.values() for place in places]
        self._in_flight.clear()
        self._waiting = sorted([*self._waiting, *lost])

    def group(self, number: int) -> tuple[Sample, ...]:
        """The samples of a complete group, in the order of their indices."""
        first = number * self._group_size
        return tuple(self._done[place] for place in range(first, first + self._group_size))

    def samples(self) -> list[Sample]:
        """All samples of a complete pool, prompt by prompt."""
        return [self._done[place] for place in range(len(self._wanted))]
