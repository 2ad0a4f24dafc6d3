"""The terms of the reward."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from grpo_mega.config.rules.problems import refuse
from grpo_mega.config.schema import RewardConfig

HEAVIEST = 1000000
"""Largest weight of a reward term: rewards are summed in 32 bits, where 1e38 would be the end."""


def check_reward(reward: RewardConfig) -> None:
    """Raises a ConfigError that lists every rule that the reward breaks."""
    refuse([*reward_problems(reward)])


def reward_problems(reward: RewardConfig) -> Iterator[str]:
    """What the settings of the reward break."""
    terms = reward.terms
    names = [term.name for term in terms]
    if not terms:
        yield "reward.terms=[] scores nothing; list at least one term, or choose reward=think_answer"
    elif reward.success not in names:
        yield f"reward.success={reward.success} is not a term of the reward; choose one of {', '.join(names)}"
    if terms and not any(term.weight for term in terms):
        yield (
            f"reward.terms all have weight 0, so every reward is 0 and nothing is learned; set "
            f"reward.terms.{names.index(reward.success) if reward.success in names else 0}.weight=1"
        )
    for name, count in Counter(names).items():
        if count > 1:
            yield f"reward.terms has {count} terms named {name}; give every term a name of its own"
    for index, term in enumerate(terms):
        field = f"reward.terms[{index}]"
        if not re.fullmatch(r"[A-Za-z]\w*", term.name):
            yield f"{field}.name={term.name!r} becomes a metric; use letters, digits and '_', a letter first"
        if not abs(term.weight) <= HEAVIEST:
            yield f"{field}.weight={term.weight}: choose a value in [-{HEAVIEST}, {HEAVIEST}]"
        if term.function is not None and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", term.function):
            yield f"{field}.function={term.function!r}; write it as package.module:function"
