"""The reward of the trainer tests, imported by path; with files they decide which groups carry a signal."""

from __future__ import annotations

import os
from pathlib import Path

from grpo_mega.types import Sample

EQUAL = "GRPO_MEGA_TEST_EQUAL"
"""Environment variable with the path of a file: as long as it exists, every sample gets the same reward."""

HALF = "GRPO_MEGA_TEST_HALF"
"""The same for samples of prompts whose tokens add up to an even number."""


def scored(sample: Sample) -> float:
    """Some number that differs between samples, unless they are to be equal."""
    even = sum(sample.prompt.token_ids) % 2 == 0
    if Path(os.environ[EQUAL]).exists() or (even and Path(os.environ[HALF]).exists()):
        return 1.0
    return float(sum(sample.token_ids) % 5)
