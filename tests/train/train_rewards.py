"""Reward functions that the runs of these tests import by path."""

from __future__ import annotations

import os
import random
import shutil
import sys
import time
from functools import cache
from pathlib import Path

import psutil

from grpo_mega.types import Sample

HOLD = "GRPO_MEGA_TEST_HOLD"
"""VERSION:FILE makes rank 0 write FILE at the first sample of this policy version, then wait for a signal.

A FILE that ends in .twice makes it wait for ever after that."""


def varied(sample: Sample) -> float:
    """Some number that differs between samples; holds the run where the test wants to catch it."""
    version, _, file = os.environ.get(HOLD, "").partition(":")
    catch = file and sample.policy_version == int(version) and os.environ["RANK"] == "0"
    if catch and not Path(file).exists():
        Path(file).touch()
        wait_for_a_signal()
        while file.endswith(".twice"):
            time.sleep(1)
    return sum(sample.token_ids) % 7 / 7


def lucky(sample: Sample) -> float:
    """As `varied`, and draws from a random number generator."""
    return varied(sample) + random.random()


def rank() -> psutil.Process:
    """The rank that this process works for; between them is the guard."""
    return psutil.Process().parent().parent()


def wait_for_a_signal() -> None:
    """Until the trainer has noted one, as it then says."""
    said = Path(f"/proc/{rank().pid}/fd/2").resolve()  # of all ranks, where they share it
    noted = f"rank {os.environ['RANK']}: SIG"
    while noted not in said.read_text(errors="replace"):
        time.sleep(0.02)


def raises(sample: Sample) -> float:
    """Fails in the second step, on the last rank alone."""
    if sample.policy_version == 1 and os.environ["RANK"] == "1":
        raise KeyError("no such column")
    return varied(sample)


def not_a_number(sample: Sample) -> float:
    """Returns nonsense in the second step, on the last rank alone."""
    return float("nan") if sample.policy_version == 1 and os.environ["RANK"] == "1" else varied(sample)


def exits(sample: Sample) -> float:
    """Ends the program in the second step, as a script does that is done."""
    if sample.policy_version == 1:
        sys.exit(0)
    return varied(sample)


def leaves(sample: Sample) -> float:
    """Ends its process in the second step, without any clean-up."""
    if sample.policy_version == 1:
        os._exit(0)
    return varied(sample)


def which_rank(_: Sample) -> float:
    """Differs between the ranks that score, as a judge with a random answer would."""
    return float(os.environ["RANK"])


def honest(sample: Sample) -> float:
    """The share of even tokens, which a run may call its success."""
    return sum(token % 2 == 0 for token in sample.token_ids) / len(sample.token_ids)


def gamed(sample: Sample) -> float:
    """What is earned by the opposite of `honest`."""
    return 1 - honest(sample)


def laborious(sample: Sample) -> float:
    """As `varied`, after work that takes as long as several steps, on rank 1 alone."""
    if os.environ["RANK"] == "1":
        sum(number * number for number in range(1_000_000))
    return varied(sample)


def choosy(sample: Sample) -> float:
    """As `varied`, but fails on every other completion of a problem."""
    if sample.index % 2:
        raise ValueError("not to my taste")
    return varied(sample)


def enormous(sample: Sample) -> float:
    """As `lucky`, in units of which a few add up to more than a number can be."""
    return 8e307 * (1 + lucky(sample) / 2)


def halting(sample: Sample) -> float:
    """As `lucky`, once after a break of more than a minute, after six updates."""
    if sample.policy_version == 6:
        _take_a_break()
    return lucky(sample)


@cache
def _take_a_break() -> None:
    time.sleep(61)  # an alarm calls no shorter phase slow


def when_reported(sample: Sample) -> float:
    """After two updates waits for the page $PAGE, and copies it to $SEEN."""
    page, seen = Path(os.environ["PAGE"]), Path(os.environ["SEEN"])
    if sample.policy_version >= 2 and not seen.exists():
        while not page.exists():
            time.sleep(0.02)
        shutil.copy(page, seen)
    return varied(sample)


def killed(sample: Sample) -> float:
    """Kills the rank after an update, with kill -9."""
    if sample.policy_version >= 1:
        rank().kill()
    return varied(sample)
