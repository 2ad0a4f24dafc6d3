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
    """Import path `package.module:function` of your own function, instead of a kind (docs/rewards.md)."""
    kind: str = ""
    """Kind of a built-in term (docs/rewards.md); by default the term's name: accuracy, boxed, stated, format,
    last_number, multiple_choice, countdown, exact, regex, reasoning_gym, language, length, overlong, repetition,
    sum_steps, code, command, http, judge, environment."""
    tasks: list[str] = field(default_factory=list)
    """Tasks that the term applies to; [] for all."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the kind (docs/rewards.md), or further arguments of the function, by name."""

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
    """A run with run.trains=reward_model or process_reward_model (its newest checkpoint), or a checkpoint; null for no
    reward model. It needs the policy's tokenizer; its architecture may differ."""
    weight: Annotated[float, Interval("(-inf, inf)"), WITH_MODEL] = 1.0
    """Factor in the total reward."""
    from_step: Annotated[int, Interval("[0, inf)"), WITH_MODEL] = 0
    """First steps without its score, which evaluations still compute (DeepSeek-R1: preferences only in the last 400
    steps)."""
    normalize: Annotated[bool, WITH_MODEL] = True
    """Normalise scores with their mean and standard deviation over its training data; not the probabilities of a
    process reward model."""
    outcome: Annotated[str, OneOf("min", "product", "last"), WITH_MODEL] = "min"
    """How a process reward model's step scores become one: min (Math-Shepherd, arXiv 2312.08935), product (Let's Verify
    Step by Step, arXiv 2305.20050) or last."""


@dataclass
class RewardConfig:
    """Reward terms and their sum."""

    terms: list[RewardTerm] = MISSING
    """A sample's reward is the sum of weight * term over the terms of its task; [] if only a reward model counts."""
    success: str = "accuracy"
    """Name of the term whose mean is reported as accuracy."""
    timeout_seconds: Annotated[float, Interval("(0, inf)")] = 60.0
    """Time limit for a call of a term's `function`, of a program or of a service."""
    on_error: Annotated[str, OneOf("stop", "leave_out")] = "stop"
    """If a term fails on a sample (an exception, an exit, a value that is not a number, a timeout of a function): stop
    the run with an error that shows the function's stack; or leave_out the sample from its group, counted in
    reward/unscorable. If a term of weight 0 fails, the sample only lacks its value."""
    model: RewardModelConfig = field(default_factory=RewardModelConfig)
