"""Reward terms, and how they add up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from omegaconf import MISSING

from grpo_mega.config.limits import Interval, OneOf


@dataclass
class RewardTerm:
    """One component of the reward."""

    name: str = ""
    """Name in the metrics; without one, that of its kind or function."""
    weight: float = 1.0
    """Factor in the total reward."""
    function: str | None = None
    """Import path `package.module:function` of a function of your own, instead of a kind.

    `f(sample: Sample)` returns a finite number, a pair (number, reason), or an object with the fields value, reason,
    unscorable and steps (`grpo_mega.reward.verdict.Verdict`). With `async def` up to 64 samples are scored at once in
    one event loop. A function whose first parameter is named `samples` gets a list of them, and returns a list; the
    list is an arbitrary part of the step, not a group, so each sample must be scored by itself.

    It runs in a process beside each rank, with the rank's working directory, import path and environment (RANK and its
    kin). Each call gets a copy of its sample, without experts, and its own seed, made of run.seed, the term and the
    sample, for the generators of `random`, and of numpy and torch if the function's module imports them: what it draws
    depends on nothing else, not on earlier calls and not on the rank. (Samples that are scored at once or in a list
    share a seed of all of them.) What it keeps between calls (caches, globals, a model loaded at import) is per rank,
    and lost when a run is continued. Wrong values, exceptions, exits and calls that take too long end the run, with the
    term and the sample named, unless reward.on_error=leave_out. Processes that it starts are killed when the run ends;
    it must not join process groups of torch.distributed.
    """
    kind: str = ""
    """The built-in that gives the value, see docs/rewards.md; without one, that of the term's name: accuracy, boxed,
    format, last_number, multiple_choice, countdown, exact, regex, reasoning_gym, language, length, overlong,
    repetition, sum_steps, code, command, http, judge."""
    tasks: list[str] = field(default_factory=list)
    """Tasks whose samples have this term; [] for all."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of the kind, see docs/rewards.md, or further arguments of the function, by name."""

    def __post_init__(self) -> None:
        """Names a term without a name by its kind or function."""
        self.name = self.name or self.kind or (self.function or "").rpartition(":")[2]

    @property
    def built_in(self) -> str:
        """The kind of a built-in term, its name's if it has no other; "" for a function of the user's."""
        return "" if self.function is not None else self.kind or self.name


LEARNED = "model"
"""Name of a reward model's score among the terms of the reward."""


@dataclass
class RewardModelConfig:
    """A reward model whose score is the term `model` of the reward, beside the others or alone.

    With algorithm.supervision=process, a process reward model's scores of steps are rewards of steps.
    """

    path: str | None = None
    """The run directory of a run with run.trains=reward_model or process_reward_model, for its newest checkpoint, or a
    checkpoint; null for no reward model. Its architecture is that of its run, its tokenizer must be the policy's."""
    weight: Annotated[float, Interval("(-inf, inf)")] = 1.0
    """Factor in the total reward."""
    from_step: Annotated[int, Interval("[0, inf)")] = 0
    """Steps before its score counts, and is computed other than for evaluations: DeepSeek-R1 learns from preferences in
    the last 400 steps only."""
    normalize: bool = True
    """Subtract the mean, and divide by the deviation, of the scores of the responses that it was trained on. A process
    reward model's are probabilities, and stay as they are."""
    outcome: Annotated[str, OneOf("min", "product", "last")] = "min"
    """What a process reward model says of a whole answer: min (of the scores of its steps; Math-Shepherd, arXiv
    2312.08935), product (Let's Verify Step by Step, arXiv 2305.20050) or last (the score of the last step)."""


@dataclass
class RewardConfig:
    """Rewards and how they add up."""

    terms: list[RewardTerm] = MISSING
    """The total reward of a sample is the sum of weight * term over the terms that its task has; [] with a reward model
    for none beside it."""
    success: str = "accuracy"
    """The term whose mean is reported as accuracy."""
    timeout_seconds: Annotated[float, Interval("(0, inf)")] = 60.0
    """Longest time that a call of a term's `function`, of a program or of a service may take."""
    on_error: Annotated[str, OneOf("stop", "leave_out")] = "stop"
    """What follows when a term fails on a sample: an exception, an exit, a value that is no number, a call of a
    function that takes too long. stop: the run ends with an error that shows where the function was; leave_out: the
    sample has no score, is left out of its group and counted in reward/unscorable."""
    model: RewardModelConfig = field(default_factory=RewardModelConfig)
