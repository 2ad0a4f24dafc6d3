"""State of each sample of each prompt (waiting, in flight, done): bookkeeping without engine or process group.

A pool is the same on every rank. It holds the answers of done samples, not their tokens.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable

from grpo_mega.types import Answer, Group, Prompt

Wanted = tuple[Prompt, int]
"""A sample to generate: its prompt, and its index among the prompt's samples."""


class Pool:
    """`group_size` samples of each prompt that was added; each is first waiting, then in flight, then done.

    Samples are numbered from 0, group after group. Prompts may be equal; their samples are interchangeable then.
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
            self._wanted += [(prompt, index) for index in range(self._group_size)]
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
            prompt, index = self._wanted[number]
            self._in_flight[prompt.id, index].append(number)
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
                f"sample {index} of prompt {prompt_id!r} is not in flight: it was not asked for, or is already done"
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
        return Group(self._wanted[numbers[0]][0], tuple(self._done[number] for number in numbers))
