"""Builds the reward of a run from its configuration: a weighted sum of built-in terms and user functions."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from grpo_mega.config.rules.reward import check_reward
from grpo_mega.config.schema import RewardConfig, RewardTerm
from grpo_mega.reward.extract import answer_tag, boxed
from grpo_mega.reward.format import think_answer_format
from grpo_mega.reward.user_functions import UserFunctions
from grpo_mega.reward.verify import equivalent
from grpo_mega.types import Sample, Score

VERIFY_THREADS = 4
"""Built-in terms are scored by so many threads, because a symbolic comparison waits for a worker process."""


def accuracy(sample: Sample) -> float:
    """1.0 when the completion has the strict format and its only answer tag holds the ground truth."""
    if not think_answer_format(sample):
        return 0.0
    answer = answer_tag(sample.text)
    return float(answer is not None and equivalent(answer, sample.prompt.answer))


def boxed_accuracy(sample: Sample) -> float:
    r"""1.0 when the completion's only `\boxed{...}` holds the ground truth; no other format is asked for."""
    answer = boxed(sample.text)
    return float(answer is not None and equivalent(answer, sample.prompt.answer))


BUILT_IN: dict[str, Callable[[Sample], float]] = {
    "accuracy": accuracy,
    "boxed": boxed_accuracy,
    "format": think_answer_format,
}


@dataclass(frozen=True)
class Term:
    """One component of the reward, ready to be called."""

    name: str
    weight: float
    function: Callable[[Sample], float]
    built_in: bool


@dataclass(frozen=True)
class Reward:
    """The reward of a run: total = sum of weight * term."""

    terms: tuple[Term, ...]

    def score(self, samples: list[Sample]) -> list[Score]:
        """The score of each sample, in the order of `samples`.

        Raises RuntimeError when a term fails on a sample and ValueError when a user function does not return a finite
        number; both name the term and the sample.
        """
        columns = [_values(term, samples) for term in self.terms]
        names = [term.name for term in self.terms]
        rows = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
        return [Score(sum(term.weight * row[term.name] for term in self.terms), row) for row in rows]


def build_reward(config: RewardConfig, seed: int = 0) -> Reward:
    """The reward that `config` describes, with the run's seed for what user functions draw.

    To be called by the main thread: the process of the user functions ends with the thread that has started it.
    Raises ValueError on anything that cannot be scored, naming the field.
    """
    check_reward(config)
    for term in config.terms:
        _check_known(term)
    paths = {term.name: term.function for term in config.terms if term.function is not None}
    functions = dict(BUILT_IN)
    if paths:
        own = UserFunctions(paths, seed, config.timeout_seconds)
        functions |= {name: partial(own.value, name) for name in paths}
    return Reward(tuple(Term(t.name, t.weight, functions[t.name], t.function is None) for t in config.terms))


def _check_known(term: RewardTerm) -> None:
    """Refuses a term that is neither built in nor a user's function."""
    if term.function is None and term.name not in BUILT_IN:
        raise ValueError(
            f"reward term {term.name!r} is not built in. Built-in terms: {', '.join(BUILT_IN)}. "
            "For a function of your own, set the term's function to its import path, package.module:function"
        )


def _values(term: Term, samples: list[Sample]) -> list[float]:
    """The term's value for every sample. User functions run one after the other: they need not be thread-safe."""
    if not term.built_in:
        return [term.function(sample) for sample in samples]
    with ThreadPoolExecutor(VERIFY_THREADS) as threads:
        return list(threads.map(lambda sample: _built_in_value(term, sample), samples))


def _built_in_value(term: Term, sample: Sample) -> float:
    """The term's value for one sample."""
    try:
        return term.function(sample)
    except Exception as error:
        where = f"reward term {term.name!r}, prompt {sample.prompt.id!r}, sample {sample.index}"
        raise RuntimeError(f"{where}: {type(error).__name__}: {error}") from error
