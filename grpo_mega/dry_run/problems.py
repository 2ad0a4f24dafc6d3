"""The problems of a job, collected check by check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from grpo_mega.config.rules import ConfigError

T = TypeVar("T")


@dataclass
class Problems:
    """What is wrong with a job, in the order of the checks, each problem once."""

    found: list[str] = field(default_factory=list)

    def add(self, *problems: str) -> None:
        """Adds those that are new."""
        self.found += [problem for problem in dict.fromkeys(problems) if problem not in self.found]

    def attempt(self, what: str, check: Callable[[], T]) -> T | None:
        """The result of a check; None when it fails: its problems are added, and the next check can be made."""
        try:
            return check()
        except ConfigError as error:
            self.add(*error.problems)
        except ImportError as error:
            print(f"not checked, for there is no {error.name} here: {what}")
        except (ValueError, OSError, RuntimeError) as error:
            self.add(str(error))
        except Exception as error:  # whatever is wrong with a file or a function of the user's, the rest is checked
            self.add(f"{what}: {type(error).__name__}: {error}")
        return None
