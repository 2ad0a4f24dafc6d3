"""The reward of the trainer tests, imported by path; with files they decide which groups carry a signal."""

from __future__ import annotations

import os
from pathlib import Path

from grpo_mega.reward.verdict import Verdict
from grpo_mega.types import Sample

EQUAL = "GRPO_MEGA_TEST_EQUAL"
"""Environment variable with the path of a file: as long as it exists, every sample gets the same reward."""

HALF = "GRPO_MEGA_TEST_HALF"
"""The same for samples of prompts whose tokens add up to an even number."""


def stepwise(sample: Sample) -> Verdict:
    """The same for every sample, though its first half and its whole earn what differs, unless they are to be equal."""
    middle, earned = len(sample.text) // 2, scored(sample) - 1.0
    steps = ((middle, 2 * earned), (len(sample.text), -earned)) if middle > 0 else ()
    return Verdict(0.0, steps=steps)


def scored(sample: Sample) -> float:
    """Some number that differs between samples, unless they are to be equal."""
    even = sum(sample.prompt.token_ids) % 2 == 0
    if Path(os.environ[EQUAL]).exists() or (even and Path(os.environ[HALF]).exists()):
        return 1.0
    return float(sum(sample.token_ids) % 5)
