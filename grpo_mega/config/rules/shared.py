"""Errors that the rules of several sections share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter

from grpo_mega.config.limits import written
from grpo_mega.config.schema import Config
from grpo_mega.errors import ConfigError, InputError, meant


def refuse(problems: Iterable[InputError]) -> None:
    """Raises a ConfigError that lists the problems, if there are any."""
    if found := [*problems]:
        raise ConfigError(found)


def divisible(config: Config, name: str, by: str) -> Iterator[InputError]:
    """An error when the field `name` is not a multiple of the field `by`."""
    value, divisor = attrgetter(name)(config), attrgetter(by)(config)
    if value > 0 and divisor > 0 and value % divisor:
        # A smaller layout must still divide the number of processes.
        fitting = (d for d in range(1, divisor) if value % d == 0 and not (by.startswith("layout.") and divisor % d))
        fix = f"choose {by}={max(fitting)}"
        if config.run.init_from is None:
            fix = f"choose {name}={multiples(value, divisor)}, or {fix.removeprefix('choose ')}"
        # Loaded weights have a fixed shape, so neither number may be changed.
        elif by.startswith("model."):
            fix = f"set both as run.init_from={config.run.init_from} has them"
        yield InputError(f"{name}={value}", f"not divisible by {by}={divisor}", fix)


def at_most(config: Config, name: str, other: str, margin: int = 0) -> Iterator[InputError]:
    """An error when the field `name` is not lower than the field `other` by at least `margin`."""
    value, limit = attrgetter(name)(config), attrgetter(other)(config)
    if value + margin > limit:
        # A context into which no completion fits is not advised.
        too_short = name == "model.context" and limit <= config.rollout.max_new_tokens
        lower = "" if too_short else f"lower {name} to {limit - margin} or "
        what = f"must be {'below' if margin else 'at most'} {other}={limit}"
        yield InputError(f"{name}={value}", what, f"{lower}raise {other} to {value + margin}")


def clashes(
    config: Config, where: str, refused: Mapping[str, tuple[object, str, str]], way_out: str
) -> Iterator[InputError]:
    """An error for each setting that does not work together with another.

    Args:
        config: The configuration.
        where: The other setting and its value.
        refused: {setting: (whether it is set to what does not work, the value to set instead, why)}.
        way_out: What to do with the other setting, instead.
    """
    for name, (is_set, instead, why) in refused.items():
        if is_set:
            yield InputError(
                f"{name}={written(attrgetter(name)(config))}",
                f"incompatible with {where}: {why}",
                f"set {name}={instead}, or {way_out}",
            )


def unknown(where: str, word: str, known: Iterable[str]) -> InputError:
    """The error about a word that is not one of those known."""
    known = [*known]
    return InputError(where, f"{word!r} is unknown", f"choose from {', '.join(known)}{meant(word, known)}")


def multiples(value: int, divisor: int) -> str:
    """The multiples of `divisor` just below and above `value`, positive ones only, as text."""
    below = value // divisor * divisor
    return " or ".join(str(multiple) for multiple in (below, below + divisor) if multiple > 0)


def divisors(value: int) -> str:
    """All divisors of `value`, as text."""
    return " or ".join(str(d) for d in range(1, value + 1) if value % d == 0)
