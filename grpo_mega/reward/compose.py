"""Builds the reward of a run from its configuration: a weighted sum of built-in terms and user functions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from grpo_mega.config.rules.reward import check_reward, read_options
from grpo_mega.config.schema import RewardConfig
from grpo_mega.errors import InputError
from grpo_mega.platform.stop import FailedOutside
from grpo_mega.platform.trace import span
from grpo_mega.reward.kinds import GUARDED, built_in
from grpo_mega.reward.steps import steps_of_tokens
from grpo_mega.reward.user_functions import UserFunction, UserFunctions
from grpo_mega.reward.verdict import Verdict
from grpo_mega.step_ends import Decode
from grpo_mega.types import Sample, Score

WARNINGS = 3
"""Number of failures to score that one call warns about; further ones appear only in the rank's log."""

KEPT_CHARACTERS = 1000
"""Number of characters of a reason that every rank gets and checkpoints hold; the log has all."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Term:
    """One term of the reward, ready to score.

    Attributes:
        name: Name in the metrics.
        weight: Factor in the total.
        outcomes: Samples -> outcome for each, in order: a verdict, or the exception that prevented one.
        tasks: Tasks that the term applies to; all tasks if empty.
    """

    name: str
    weight: float
    outcomes: Callable[[Sequence[Sample]], Iterable[Verdict | Exception]]
    tasks: frozenset[str] = frozenset()

    def has(self, sample: Sample) -> bool:
        """Whether the term applies to this sample."""
        return not self.tasks or sample.prompt.task in self.tasks


@dataclass(frozen=True)
class Reward:
    """The reward of a run: total = sum of weight * term, over the terms that apply to the sample's task.

    Attributes:
        terms: Terms of the sum.
        leave_out: Whether a sample on which a term fails is left without a score; otherwise it is an error.

    A term of weight 0 changes no total: where it fails, the sample lacks that term's value and keeps its score.
    """

    terms: tuple[Term, ...]
    leave_out: bool = False

    def score(self, samples: Sequence[Sample], decode: Decode | None = None) -> list[Score]:
        """Score of each sample, in order. What could not be scored is logged.

        Args:
            samples: Samples, of any prompts.
            decode: Decodes token ids to text, to locate the rewards of steps; None for scores without steps.

        Raises:
            RuntimeError: A term fails on a sample, unless such samples are left out; names the term and the sample.
            ValueError: A user function returns something other than a verdict; InputError when no term applies to the
                sample's task.
        """
        verdicts: list[dict[str, Verdict]] = [{} for _ in samples]
        unscorable: dict[int, str] = {}
        failures = 0
        # Term by term, not sample by sample, so that each term gets all its samples at once and can batch them. Samples
        # that have already lost their score are not sent to further terms.
        for term in self.terms:
            chosen = [i for i, s in enumerate(samples) if term.has(s) and i not in unscorable]
            with span("term", name=term.name, samples=len(chosen)):
                outcomes = term.outcomes([samples[i] for i in chosen])
            for i, outcome in zip(chosen, outcomes, strict=True):
                verdict = verdicts[i][term.name] = self._verdict(term, samples[i], outcome)
                if verdict.unscorable:
                    failures += 1
                    why = f"reward term {term.name!r}: {verdict.unscorable}"
                    # A term of weight 0 is only observed, so its failure must not cost the sample its score.
                    if term.weight:
                        unscorable[i] = why
                    lacks = "score" if term.weight else "value of a term of weight 0"
                    level = logging.WARNING if failures <= WARNINGS else logging.INFO
                    logger.log(level, "%s has no %s: %s", _in_words(samples[i]), lacks, why)
        return [
            Score(0.0, {}, unscorable=unscorable[i][:KEPT_CHARACTERS])
            if i in unscorable
            else self._score(samples[i], of_sample, decode)
            for i, of_sample in enumerate(verdicts)
        ]

    def _verdict(self, term: Term, sample: Sample, outcome: Verdict | Exception) -> Verdict:
        """The verdict if there is one, else a missing score; raises the error if failing samples are not left out."""
        # A step beyond the end of the text has no token, so the verdict is invalid.
        if isinstance(outcome, Verdict):
            if not outcome.steps or outcome.steps[-1][0] <= len(sample.text):
                return outcome
            outcome = ValueError(
                f"its step {len(outcome.steps)} ends at character {outcome.steps[-1][0]}, and the completion has "
                f"{len(sample.text)}"
            )
        if self.leave_out:
            return Verdict(0.0, unscorable=str(outcome))
        where = f"reward term {term.name!r}, {_in_words(sample)}"
        if isinstance(outcome, InputError):
            raise InputError(f"{where}: {outcome.where}", outcome.what, outcome.fix) from outcome
        if isinstance(outcome, ValueError):
            raise ValueError(f"{where}: {outcome}") from outcome
        raised, newline, stack = str(outcome).partition("\n")
        advice = "if few samples fail, reward.on_error=leave_out goes on without them"
        raise FailedOutside(f"{where}: {raised}; {advice}{newline}{stack}") from outcome

    def _score(self, sample: Sample, verdicts: dict[str, Verdict], decode: Decode | None) -> Score:
        # Without any terms, a reward model's score is the whole reward; but no term for this task is a mistake.
        if not verdicts and self.terms:
            what = f"no reward term has the task {sample.prompt.task!r}"
            raise InputError(_in_words(sample), what, "add it to reward.terms[].tasks of one")
        weighted = [(term.weight, verdicts[term.name]) for term in self.terms if term.name in verdicts]
        total = sum(weight * verdict.value for weight, verdict in weighted)
        try:
            steps = steps_of_tokens(sample, weighted, decode) if decode else ()
        except InputError as error:
            if self.leave_out:
                return Score(0.0, {}, unscorable=str(error)[:KEPT_CHARACTERS])
            raise InputError(f"{_in_words(sample)}: {error.where}", error.what, error.fix) from error
        words = {name: verdict.unscorable or verdict.reason for name, verdict in verdicts.items()}
        reasons = "; ".join(f"{name}: {reason}" for name, reason in words.items() if reason)
        terms = {name: verdict.value for name, verdict in verdicts.items() if not verdict.unscorable}
        return Score(total, terms, reasons[:KEPT_CHARACTERS], steps=steps)


def build_reward(config: RewardConfig, seed: int = 0) -> Reward:
    """The reward that `config` describes, with the run's seed for the random numbers of user functions.

    Must be called by the main thread: the process of the user functions ends with the thread that has started it.
    Raises InputError for a configuration that cannot be scored, naming the field.
    """
    check_reward(config)
    leave_out = config.on_error == "leave_out"
    functions = {}
    for term in config.terms:
        if term.function is not None:
            functions[term.name] = UserFunction(term.function, term.options)
        elif term.built_in in GUARDED:
            options = asdict(read_options(term.built_in, term.options))
            functions[term.name] = UserFunction(GUARDED[term.built_in], options)
    guarded = UserFunctions(functions, seed, config.timeout_seconds, restart=leave_out) if functions else None
    terms = []
    for term in config.terms:
        if guarded and term.name in functions:
            outcomes: Callable[[Sequence[Sample]], Iterable[Verdict | Exception]]
            outcomes = partial(guarded.outcomes, term.name)
        else:
            outcomes = built_in(term.built_in, read_options(term.built_in, term.options), config.timeout_seconds)
        terms.append(Term(term.name, term.weight, outcomes, frozenset(term.tasks)))
    return Reward(tuple(terms), leave_out)


def _in_words(sample: Sample) -> str:
    """Name of a sample in messages."""
    return f"prompt {sample.prompt.id!r}, sample {sample.index}"
