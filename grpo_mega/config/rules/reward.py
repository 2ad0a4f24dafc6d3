"""Rules about the reward terms."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields

from grpo_mega.config.rules.problems import refuse
from grpo_mega.config.rules.terms import read_options
from grpo_mega.config.schema import RewardConfig, RewardModelConfig, RewardTerm
from grpo_mega.config.schema.reward import LEARNED
from grpo_mega.config.schema.terms import OPTIONS

HEAVIEST = 1000000
"""Largest weight of a reward term: rewards are summed in fp32, which overflows at about 3e38."""
METRICS = ("mean", "std", "unscorable")
"""Names of metrics of the whole reward, which terms must not use."""


def check_reward(reward: RewardConfig) -> None:
    """Raises a ConfigError that lists every rule that the reward violates."""
    refuse([*reward_problems(reward)])


def reward_problems(reward: RewardConfig) -> Iterator[str]:
    """A message for each violated rule about the reward."""
    terms = reward.terms
    names = [term.name for term in terms]
    learned = reward.model.path is not None
    yield from _model_problems(reward)
    if not terms and not learned:
        yield "reward.terms=[] scores nothing; list at least one term, or choose reward=think_answer"
    elif terms and reward.success not in names:
        yield f"reward.success={reward.success} is not a term of the reward; choose one of {', '.join(names)}"
    if terms and not learned and not any(term.weight for term in terms):
        yield (
            f"reward.terms all have weight 0, so every reward is 0 and nothing is learned; set "
            f"reward.terms.{names.index(reward.success) if reward.success in names else 0}.weight=1"
        )
    for name, count in Counter(names).items():
        if count > 1:
            yield f"reward.terms has {count} terms named {name}; give every term a name of its own"
    for index, term in enumerate(terms):
        field = f"reward.terms[{index}]"
        if not term.name:
            yield f"{field} has neither name nor kind nor function; give it a kind of docs/rewards.md"
            continue
        named = re.fullmatch(r"[A-Za-z]\w*", term.name)
        if not named:
            yield f"{field}.name={term.name!r} becomes a metric; use letters, digits and '_', a letter first"
        if term.name in METRICS:
            yield f"{field}.name={term.name}: reward/{term.name} is a metric of the whole reward; give the term another"
        if not abs(term.weight) <= HEAVIEST:
            yield f"{field}.weight={term.weight}: choose a value in [-{HEAVIEST}, {HEAVIEST}]"
        if term.function is not None:
            yield from _function_problems(term, field)
        elif named:
            yield from _kind_problems(term, field)


def _model_problems(reward: RewardConfig) -> Iterator[str]:
    """A message for each violated rule about a reward model, and each of its settings without effect."""
    model = reward.model
    if model.path is None:
        for field in fields(RewardModelConfig):
            if (value := getattr(model, field.name)) != field.default:
                yield (
                    f"reward.model.{field.name}={value} has no effect without a reward model; give reward.model.path, "
                    f"or leave reward.model.{field.name} out"
                )
        return
    if not 0 < abs(model.weight) <= HEAVIEST:
        yield f"reward.model.weight={model.weight}: choose a value in [-{HEAVIEST}, {HEAVIEST}], not 0"
    for index, term in enumerate(reward.terms):
        if term.name == LEARNED:
            yield f"reward.terms[{index}].name={LEARNED} is the name of the reward model's score; give the term another"
    if model.from_step and not any(term.weight for term in reward.terms):
        yield (
            f"reward.model.from_step={model.from_step} leaves the steps before it without any reward; set it to 0, or "
            "give reward.terms"
        )


def _function_problems(term: RewardTerm, field: str) -> Iterator[str]:
    """Rules about a term with a user function."""
    if term.kind:
        yield f"{field}.kind={term.kind} and function={term.function} exclude each other; remove one"
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", term.function or ""):
        yield f"{field}.function={term.function!r}; write it as package.module:function"
    for name in term.options:
        if not str(name).isidentifier():
            yield f"{field}.options: {name!r} cannot be the name of an argument; use letters, digits and '_'"


def _kind_problems(term: RewardTerm, field: str) -> Iterator[str]:
    """Rules about a built-in term."""
    if term.built_in not in OPTIONS:
        yield (
            f"reward term {term.built_in!r} is not built in. Built-in terms: {', '.join(OPTIONS)}. "
            "For a function of your own, set the term's function to its import path, package.module:function"
        )
        return
    try:
        read_options(term.built_in, term.options)
    except ValueError as error:
        yield f"{field}.options.{error}"
