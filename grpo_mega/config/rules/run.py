"""Rules about the run's name and directory."""

from __future__ import annotations

import re
from collections.abc import Iterator

from grpo_mega.config.schema import Config

LONGEST_NAME = 100
"""Most characters of a run's name, which becomes part of file names."""


def run_problems(config: Config) -> Iterator[str]:
    """A message for each rule that the names of the run violate."""
    if not re.fullmatch(r"\w[\w.-]*", config.run.name, re.ASCII):
        yield (
            f"run.name={config.run.name!r} must be a plain file name: letters, digits, '_', '-' and '.', "
            "beginning with a letter, digit or '_'"
        )
    if len(config.run.name) > LONGEST_NAME:
        yield f"run.name has {len(config.run.name)} characters and names a directory; choose at most {LONGEST_NAME}"
    if not config.run.root.strip():
        yield "run.root='' names no directory; set run.root=. for the working directory, or run.root=runs"
