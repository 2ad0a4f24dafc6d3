"""Reward terms, and their sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from omegaconf import MISSING

from grpo_mega.config.limits import Interval, IsSet, OneOf, With


@dataclass
class RewardTerm:
    """One term of the reward."""

    name: str = ""
    """Name in the metrics; by default that of its kind or function."""
    weight: float = 1.0
    """Factor in the total reward."""
    function: str | None = None
    """Import path `package.module:function` of your own function, instead of a kind.

    `f(sample: Sample)` returns a finite number, a pair (number, reason), or an object with the fields value, reason,
    unscorable and steps (`grpo_mega.reward.verdict.Verdict`). With `async def` up to 64 samples are scored at once in
    one event loop. A function whose first parameter is named `samples` gets a list of them, and returns a list; the
    list is an arbitrary part of the step, not a group, so each sample must be scored independently.

    The function runs in a separate process for each rank, with the rank's working directory, import path and
    environment (RANK and the like). Each call gets a copy of its sample, without experts, and its own seed, made of
    run.seed, the term and the sample, for the generators of `random`, and of numpy and torch if the function's module
    imports them: its random numbers depend on nothing else, neither on earlier calls nor on the rank. (Samples that are
    scored at once or in a list share a seed of all of them.) State kept between calls (caches, globals, a model loaded
    at import) is per rank, and lost when a run is resumed. Wrong values, exceptions, exits and calls that take too long
    end the run, with the term and the sample named, unless reward.on_error=leave_out. Processes that it starts are
    killed when the run ends; it must not join process groups of torch.distributed."""
    kind: str = ""
    """Kind of a built-in term, see docs/rewards.md; by default the term's name: accuracy, boxed, stated, format,
    last_number, multiple_choice, countdown, exact, regex, reasoning_gym, language, length, overlong, repetition,
    sum_steps, code, command, http, judge, environment."""
    tasks: list[str] = field(default_factory=list)
    """Tasks that the term applies to; [] for all."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of the kind, see docs/rewards.md, or further arguments of the function, by name."""

    def __post_init__(self) -> None:
        """Gives a term without a name that of its kind or function."""
        self.name = self.name or self.kind or (self.function or "").rpartition(":")[2]

    @property
    def built_in(self) -> str:
        """Kind of a built-in term, by default its name; "" for a user function."""
        return "" if self.function is not None else self.kind or self.name


NOT_SHARES = ("judge", "http", "command", "overlong", "repetition", "environment")
"""Kinds of terms whose values are not from 0 to 1: those of services and programs, and penalties."""


def success_is_share(reward: Mapping[str, Any]) -> bool:
    """Whether the kind of a reward's success term has values from 0 to 1, so that its mean is a share."""
    terms = [term for term in reward["terms"] if term["name"] == reward["success"]]
    return bool(terms) and not any(term["function"] or (term["kind"] or term["name"]) in NOT_SHARES for term in terms)


LEARNED = "model"
"""Name of a reward model's score among the reward terms."""


WITH_MODEL = With("path", IsSet())


@dataclass
class RewardModelConfig:
    """A reward model whose score is the reward term `model`, with or without other terms.

    With algorithm.supervision=process, a process reward model's scores of steps are rewards of steps.
    """

    path: str | None = None
    """Directory of a run with run.trains=reward_model or process_reward_model (its newest checkpoint), or a checkpoint;
    null for no reward model. Its tokenizer must be the policy's, its architecture may differ."""
    weight: Annotated[float, Interval("(-inf, inf)"), WITH_MODEL] = 1.0
    """Factor in the total reward."""
    from_step: Annotated[int, Interval("[0, inf)"), WITH_MODEL] = 0
    """Number of first steps without its score, which is then computed for evaluations only: DeepSeek-R1 learns from
    preferences only in the last 400 steps."""
    normalize: Annotated[bool, WITH_MODEL] = True
    """Normalise scores with the mean and standard deviation over the responses that it was trained on. Scores of a
    process reward model are probabilities and are not normalised."""
    outcome: Annotated[str, OneOf("min", "product", "last"), WITH_MODEL] = "min"
    """Score of a whole answer by a process reward model: min (of the scores of its steps; Math-Shepherd, arXiv
    2312.08935), product (Let's Verify Step by Step, arXiv 2305.20050) or last (the score of the last step)."""


@dataclass
class RewardConfig:
    """Reward terms and their sum."""

    terms: list[RewardTerm] = MISSING
    """The total reward of a sample is the sum of weight * term over the terms that apply to its task; [] with a reward
    model for no others."""
    success: str = "accuracy"
    """Name of the term whose mean is reported as accuracy."""
    timeout_seconds: Annotated[float, Interval("(0, inf)")] = 60.0
    """Time limit for a call of a term's `function`, of a program or of a service."""
    on_error: Annotated[str, OneOf("stop", "leave_out")] = "stop"
    """Action when a term fails on a sample (an exception, an exit, a value that is not a number, a timeout of a
    function): stop ends the run with an error that shows the function's stack; leave_out leaves the sample without a
    score, out of its group, and counts it in reward/unscorable. If the term has weight 0, the sample keeps its score
    and lacks only the term's value."""
    model: RewardModelConfig = field(default_factory=RewardModelConfig)
