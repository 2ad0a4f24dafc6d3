"""Reward functions that the runs of these tests import by path."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

from grpo_mega.types import Sample

HOLD = "GRPO_MEGA_TEST_HOLD"
"""VERSION:FILE makes rank 0 write FILE at the first sample of this policy version, then wait for a signal."""


def varied(sample: Sample) -> float:
    """Some number that differs between samples; holds the run where the test wants to catch it."""
    version, _, file = os.environ.get(HOLD, "").partition(":")
    catch = file and sample.policy_version == int(version) and os.environ["RANK"] == "0"
    if catch and not Path(file).exists():
        Path(file).touch()
        while not _asked_to_stop():  # signal.pause() would miss a signal that is faster than it
            time.sleep(0.02)
    return sum(sample.token_ids) % 7 / 7


def lucky(sample: Sample) -> float:
    """As `varied`, and draws from a random number generator that a checkpoint holds."""
    return varied(sample) + random.random()


def _asked_to_stop() -> bool:
    """Whether the trainer has noted a signal."""
    noted_by = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return getattr(noted_by, "received", None) is not None


def raises(sample: Sample) -> float:
    """Fails in the second step, on the last rank alone."""
    if sample.policy_version == 1 and os.environ["RANK"] == "1":
        raise KeyError("no such column")
    return varied(sample)


def not_a_number(sample: Sample) -> float:
    """Returns nonsense in the second step, on the last rank alone."""
    return float("nan") if sample.policy_version == 1 and os.environ["RANK"] == "1" else varied(sample)


def which_rank(_: Sample) -> float:
    """Differs between the ranks that score, as a judge with a random answer would."""
    return float(os.environ["RANK"])
