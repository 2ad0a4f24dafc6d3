"""Reporting of violated rules: the error, and messages shared by the rules of several rooms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

from grpo_mega.config.schema import Config
from grpo_mega.errors import InputError


class ConfigError(InputError):
    """A configuration that cannot run; the message has one line per violated rule.

    Attributes:
        problems: One text for each violated rule.
    """

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        """Without `problems`, `message` is the only problem."""
        super().__init__(message, "", "")
        self.problems = [*problems] or [message]

    def __str__(self) -> str:
        return self.where


def refuse(problems: list[str]) -> None:
    """Raises a ConfigError that lists the problems, if there are any."""
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise ConfigError(f"the configuration cannot run:\n{lines}", problems)


def divisible(config: Config, name: str, by: str) -> Iterator[str]:
    """A message when the field `name` is not a multiple of the field `by`."""
    value, divisor = _get(config, name), _get(config, by)
    if value > 0 and divisor > 0 and value % divisor:
        # A smaller layout must still divide the number of processes.
        fitting = (d for d in range(1, divisor) if value % d == 0 and not (by.startswith("layout.") and divisor % d))
        fix = f"choose {by}={max(fitting)}"
        if config.run.init_from is None:
            fix = f"choose {name}={multiples(value, divisor)}, or {fix.removeprefix('choose ')}"
        elif by.startswith("model."):  # loaded weights have a fixed shape
            fix = f"set both as run.init_from={config.run.init_from} has them"
        yield f"{name}={value} is not divisible by {by}={divisor}; {fix}"


def at_most(config: Config, name: str, other: str, margin: int = 0) -> Iterator[str]:
    """A message when the field `name` is not lower than the field `other` by at least `margin`."""
    value, limit = _get(config, name), _get(config, other)
    if value + margin > limit:
        too_short = name == "model.context" and limit <= config.rollout.max_new_tokens
        lower = "" if too_short else f"lower {name} to {limit - margin} or "
        yield (
            f"{name}={value} must be {'below' if margin else 'at most'} {other}={limit}; "
            f"{lower}raise {other} to {value + margin}"
        )


def multiples(value: int, divisor: int) -> str:
    """The multiples of `divisor` just below and above `value`, positive ones only, as text."""
    below = value // divisor * divisor
    return " or ".join(str(multiple) for multiple in (below, below + divisor) if multiple > 0)


def divisors(value: int) -> str:
    """All divisors of `value`, as text."""
    return " or ".join(str(d) for d in range(1, value + 1) if value % d == 0)


def _get(config: Config, name: str) -> int:
    return attrgetter(name)(config)
