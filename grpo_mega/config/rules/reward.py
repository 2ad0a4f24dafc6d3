"""Rules about the reward: its terms and their options, and a reward model."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import MISSING as REQUIRED
from dataclasses import fields
from typing import Any, get_args, get_origin, get_type_hints

from grpo_mega.config.limits import limit_problems
from grpo_mega.config.rules.shared import refuse
from grpo_mega.config.schema import RewardConfig, RewardTerm
from grpo_mega.config.schema.reward import LEARNED
from grpo_mega.config.schema.terms import OPTIONS
from grpo_mega.errors import InputError, meant

HEAVIEST = 1000000
"""Largest weight of a reward term: rewards are summed in fp32, which overflows at about 3e38."""
METRICS = ("mean", "std", "unscorable")
"""Names of metrics of the whole reward, which terms must not use."""


def check_reward(reward: RewardConfig) -> None:
    """Raises a ConfigError that lists every rule that the reward violates."""
    refuse(reward_problems(reward))


def reward_problems(reward: RewardConfig) -> Iterator[InputError]:
    """An error for each violated rule about the reward."""
    terms = reward.terms
    names = [term.name for term in terms]
    learned = reward.model.path is not None
    if learned:
        yield from _model_problems(reward)
    if not terms and not learned:
        yield InputError("reward.terms=[]", "scores nothing", "list at least one term, or choose reward=think_answer")
    # With a misspelt term, which is refused below, the choice would name the misspelling.
    elif terms and reward.success not in names and all(term.function or term.built_in in OPTIONS for term in terms):
        yield InputError(
            f"reward.success={reward.success}", "not a term of the reward", f"choose one of {', '.join(names)}"
        )
    if terms and not learned and not any(term.weight for term in terms):
        yield InputError(
            "reward.terms",
            "all have weight 0, so every reward is 0 and nothing is learned",
            f"set reward.terms.{names.index(reward.success) if reward.success in names else 0}.weight=1",
        )
    for name, count in Counter(names).items():
        if count > 1:
            yield InputError("reward.terms", f"{count} terms are named {name}", "give every term a different name")
    for index, term in enumerate(terms):
        yield from _term_problems(term, f"reward.terms[{index}]")


def _model_problems(reward: RewardConfig) -> Iterator[InputError]:
    """An error for each violated rule about a reward model."""
    model = reward.model
    if not 0 < abs(model.weight) <= HEAVIEST:
        yield InputError(
            f"reward.model.weight={model.weight}", "out of range", f"choose a value in [-{HEAVIEST}, {HEAVIEST}], not 0"
        )
    for index, term in enumerate(reward.terms):
        if term.name == LEARNED:
            yield InputError(
                f"reward.terms[{index}].name={LEARNED}", "the name of the reward model's score", "choose another name"
            )
    if model.from_step and not any(term.weight for term in reward.terms):
        yield InputError(
            f"reward.model.from_step={model.from_step}",
            "the steps before it have no reward",
            "set it to 0, or give reward.terms",
        )


def _term_problems(term: RewardTerm, field: str) -> Iterator[InputError]:
    """An error for each violated rule about one term."""
    if not term.name:
        yield InputError(field, "has neither name nor kind nor function", "give it a kind of docs/rewards.md")
        return
    named = re.fullmatch(r"[A-Za-z]\w*", term.name)
    if not named:
        what = "becomes a metric"
        yield InputError(f"{field}.name={term.name!r}", what, "use letters, digits and '_', a letter first")
    if term.name in METRICS:
        what = f"reward/{term.name} is a metric of the whole reward"
        yield InputError(f"{field}.name={term.name}", what, "choose another name")
    # `not <=` rather than `>`, so that NaN is refused as well.
    if not abs(term.weight) <= HEAVIEST:
        fix = f"choose a value in [-{HEAVIEST}, {HEAVIEST}]"
        yield InputError(f"{field}.weight={term.weight}", "out of range", fix)
    # A function of the user, or a built-in kind; each has its own rules for options.
    if term.function is not None:
        if term.kind:
            yield InputError(f"{field}.kind={term.kind}", f"excludes function={term.function}", "remove one of the two")
        if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", term.function):
            yield InputError(
                f"{field}.function={term.function!r}", "not an import path", "write it as package.module:function"
            )
        for name in term.options:
            if not str(name).isidentifier():
                what = f"{name!r} cannot be the name of an argument"
                yield InputError(f"{field}.options", what, "use letters, digits and '_'")
    elif term.built_in in OPTIONS:
        try:
            read_options(term.built_in, term.options)
        except InputError as error:
            yield InputError(f"{field}.options.{error.where}", error.what, error.fix)
    elif named:
        yield InputError(
            f"{field}.{'kind' if term.kind else 'name'}={term.built_in}",
            f"not a built-in term{meant(term.built_in, OPTIONS)}",
            f"choose one of {', '.join(OPTIONS)}; or set the term's function to the import path of yours, "
            "package.module:function",
        )


def read_options(kind: str, given: dict[str, Any]) -> Any:
    """Options of a term of this kind, as the dataclass in `OPTIONS`.

    Raises:
        InputError: An option is unknown, missing, of another type or out of bounds; `where` begins with its name.
    """
    schema = OPTIONS[kind]
    known = {field.name: field for field in fields(schema)}
    hints = get_type_hints(schema)
    for name, value in given.items():
        if name not in known:
            fix = f"choose from {', '.join(known)}{meant(name, known)}" if known else "leave it out"
            raise InputError(name, f"not an option of {kind}", fix)
        if not _is_a(value, hints[name]):
            raise InputError(f"{name}={value!r}", "of the wrong type", f"write {_in_words(hints[name])}")
    for name, field in known.items():
        if name not in given and field.default is REQUIRED and field.default_factory is REQUIRED:
            raise InputError(name, f"required by {kind}", f"give {_in_words(hints[name])}")
    options = schema(**{name: float(value) if hints[name] is float else value for name, value in given.items()})
    for problem in limit_problems(options):
        raise problem
    return options


def lowest(term: RewardTerm) -> float:
    """Lower bound of weight * value of a term whose options are valid.

    What a function, a program or a service returns is not known: the value is taken to be 0 or more.
    """
    low, high = 0.0, 1.0
    if term.built_in in ("overlong", "repetition"):
        low, high = -1.0, 0.0
    elif term.built_in == "judge":
        options = read_options(term.built_in, term.options)
        low, high = options.low, options.high
    elif term.built_in in ("", "command", "http"):
        high = math.inf
    return min(term.weight * low, term.weight * high) if term.weight else 0.0


def _is_a(value: Any, kind: Any) -> bool:
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_is_a(item, *get_args(kind)) for item in value)
    # In Python true is an int, and so would pass as a number.
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is kind


def _in_words(kind: Any) -> str:
    if get_origin(kind) is list:
        return "a list of texts"
    return {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}[kind]
