"""Majority votes: groups the samples of a problem by equal answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch.distributed as dist

from grpo_mega.config.rules.reward import read_options
from grpo_mega.config.schema import RewardConfig
from grpo_mega.judges.math.verify import equivalent
from grpo_mega.platform.collectives import from_all_ranks
from grpo_mega.reward.answers import chosen_option, number_in
from grpo_mega.reward.extract import final_answer
from grpo_mega.types import Rollout, Sample

LONGEST = 1000
"""Longest answer that can be voted for, in characters, as all ranks get all answers."""
PLACES = {"accuracy": "tag", "boxed": "boxed", "stated": "stated"}
"""Kind of term that compares values -> where it reads the answer, see `final_answer`."""
Votes = list[list[int | None]]
"""For every sample of every group, the number of its answer, equal for equal answers of the group; None without one."""


@dataclass(frozen=True)
class Ballot:
    """How the final answers of samples are read and compared.

    Attributes:
        read: The final answer of a sample; None when it has none.
        same: Whether two answers are equal.
    """

    read: Callable[[Sample], str | None]
    same: Callable[[str, str], bool]


def ballot_of(reward: RewardConfig) -> Ballot | None:
    """Ballot of the reward's success term; None, so no votes, if only the term itself can read answers.

    Supported kinds: accuracy, boxed, stated, exact, last_number, multiple_choice and reasoning_gym (compared as text:
    an answer in other words is a different one).
    """
    term = next((term for term in reward.terms if term.name == reward.success), None)
    if term is None:
        return None
    if term.built_in == "last_number":
        return Ballot(lambda sample: _votable(number_in(sample)), equivalent)
    if term.built_in not in ("accuracy", "boxed", "stated", "multiple_choice", "reasoning_gym", "exact"):
        return None
    options = read_options(term.built_in, term.options)
    if term.built_in == "multiple_choice":
        return Ballot(lambda sample: chosen_option(sample, options), str.__eq__)
    if term.built_in in PLACES:
        return Ballot(partial(_read, PLACES[term.built_in], options.strict), equivalent)
    read = partial(_read, options.read, options.strict)
    if term.built_in == "exact" and options.ignore_case:
        return Ballot(read, lambda one, other: one.casefold() == other.casefold())
    return Ballot(read, str.__eq__)


def answer_numbers(answers: Sequence[str | None], same: Callable[[str, str], bool]) -> list[int | None]:
    """Numbers answers in the order of first occurrence; equal answers share a number, None has none.

    An answer is compared with the first one of each number.
    """
    first: list[str] = []
    known: dict[str, int] = {}
    for answer in answers:
        if answer is None or answer in known:
            continue
        known[answer] = next((number for number, other in enumerate(first) if same(answer, other)), len(first))
        if known[answer] == len(first):
            first.append(answer)
    return [None if answer is None else known[answer] for answer in answers]


def votes_of(rollout: Rollout, ballot: Ballot) -> Votes:
    """Votes of a rollout's samples, on every rank; every rank must call it, as ranks share the comparisons.

    Raises:
        RuntimeError: Reading or comparing failed on some rank.
    """
    held = rollout.samples
    read = from_all_ranks(lambda: {number: ballot.read(sample) for number, sample in held.items()})
    answers = {number: answer for of_rank in read for number, answer in of_rank.items()}
    ends = [0, *accumulate(len(group.infos) for group in rollout.groups)]
    mine = range(dist.get_rank(), len(rollout.groups), dist.get_world_size())

    def compared() -> dict[int, list[int | None]]:
        return {
            group: answer_numbers([answers[number] for number in range(ends[group], ends[group + 1])], ballot.same)
            for group in mine
        }

    votes = {group: numbers for of_rank in from_all_ranks(compared) for group, numbers in of_rank.items()}
    return [votes[group] for group in range(len(rollout.groups))]


def _read(where: str, strict: bool, sample: Sample) -> str | None:
    return _votable(final_answer(sample, where, strict))


def _votable(answer: str | None) -> str | None:
    """An answer with single spaces; None if it is missing, empty, or too long to vote for."""
    answer = " ".join((answer or "").split())
    return answer if 0 < len(answer) <= LONGEST else None
