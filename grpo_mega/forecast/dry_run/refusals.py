"""What the checks of a job refuse, collected check by check."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from grpo_mega.checks import Check
from grpo_mega.errors import ConfigError

T = TypeVar("T")


@dataclass
class Refusals:
    """What is wrong with a job, in the order of the checks, each once."""

    found: list[str] = field(default_factory=list)

    def add(self, *problems: str) -> None:
        """Adds the problems that are new."""
        self.found += [problem for problem in dict.fromkeys(problems) if problem not in self.found]

    def attempt_all(self, checks: Iterable[Check]) -> None:
        """Runs the checks, and adds their problems."""
        for what, check in checks:
            self.attempt(what, check)

    def attempt(self, what: str, check: Callable[[], T]) -> T | None:
        """Result of a check; None if it fails: its problems are added, and further checks can run."""
        try:
            return check()
        except ConfigError as error:
            self.add(*map(str, error.problems))
        except ImportError as error:
            print(f"skipped, since {error.name} is not installed: {what}")
        except (ValueError, OSError, RuntimeError) as error:
            self.add(str(error))
        # Data files and a user's functions can raise anything, which must not prevent other checks.
        except Exception as error:
            self.add(f"{what}: {type(error).__name__}: {error}")
        return None
