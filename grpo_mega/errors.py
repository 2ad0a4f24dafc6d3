"""Errors about input: where it is, what is wrong with it, and what to do."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path


class InputError(ValueError):
    """A setting, file, sample or rank that cannot be used; its text is "where: what; fix".

    Attributes:
        where: The setting and its value ("run.steps=-1"), the file and line ("train.jsonl:7"), the sample or the rank.
        what: What is wrong.
        fix: What to do.
    """

    def __init__(self, where: str, what: str, fix: str) -> None:
        """All three become `args`, so that the error survives the way from one process to another."""
        super().__init__(where, what, fix)
        self.where, self.what, self.fix = where, what, fix

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.fix}"

    @property
    def field(self) -> str:
        """The setting without its value."""
        return self.where.partition("=")[0]


class ConfigError(InputError):
    """A configuration that cannot run; its text has one line per violated rule.

    Attributes:
        problems: Every violated rule; `where`, `what` and `fix` are those of the first.
    """

    def __init__(self, problems: Sequence[InputError]) -> None:
        """At least one problem."""
        first = problems[0]
        super().__init__(first.where, first.what, first.fix)
        self.args = (problems,)
        self.problems = list(problems)

    @staticmethod
    def of(problems: Sequence[InputError]) -> InputError:
        """The only problem itself, or one error of several."""
        return problems[0] if len(problems) == 1 else ConfigError(problems)

    def __str__(self) -> str:
        return "\n  - ".join(["the configuration cannot run:", *map(str, self.problems)])


def meant(word: str, known: Iterable[str]) -> str:
    """ " (did you mean X?)" for the closest of the known words; "" if none is close."""
    return "".join(f" (did you mean {close}?)" for close in get_close_matches(word, [*known], n=1))


def instead_of(path: str | Path) -> str:
    """ " (FOLDER/ has X, Y)" with the names closest to a path that does not exist, best first; "" if none is close."""
    path = Path(path)
    folder = next((one for one in path.parents if os.path.isdir(one)), path)
    missing = next(iter(path.relative_to(folder).parts), "")
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith(".") and name != missing)
    except OSError:
        return ""

    def stem(name: str) -> str:
        """Without a suffix such as .jsonl, in which all names may be alike."""
        root, suffix = os.path.splitext(name)
        return (root if suffix[1:].isalpha() else name).casefold()

    stems = sorted({stem(name) for name in names})
    # Letters in another order are what `get_close_matches` finds least alike.
    like = [one for one in stems if sorted(one) == sorted(stem(missing))] or get_close_matches(stem(missing), stems)
    # Of those with one stem the ones of the same suffix come first.
    names.sort(key=lambda name: Path(name).suffix != path.suffix)
    close = [name for one in like for name in names if stem(name) == one]
    return f" ({os.path.join(folder, '')} has {', '.join(close[:3])})" if close else ""
