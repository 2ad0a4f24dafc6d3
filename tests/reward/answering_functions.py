"""The forms of users' reward functions that are no plain `f(sample) -> float`; imported by path."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from dataclasses import dataclass

from grpo_mega.reward.verdict import Verdict
from grpo_mega.types import Sample

under_way = most_under_way = 0


@dataclass
class Grade:
    """Has a value and a reason, and is not ours."""

    value: float
    reason: str | None = None


def pair(sample: Sample) -> tuple[float, str]:
    return len(sample.text), f"{sample.text} is short"


def grade(sample: Sample) -> Grade:
    return Grade(0.5, sample.text or None)


def away(sample: Sample) -> Verdict:
    return Verdict(1.0) if sample.text else Verdict(0.0, unscorable="the grader is away")


def both(sample: Sample, *, bonus: float, words: list[str]) -> float:
    return bonus + words.count(sample.text)


async def together(sample: Sample) -> tuple[float, str]:
    """Says how many were under way at once; none ends before all have begun that may."""
    global under_way, most_under_way
    under_way += 1
    most_under_way = max(under_way, most_under_way)
    for _ in range(100):
        await asyncio.sleep(0)
    under_way -= 1
    return sample.index, str(most_under_way)


async def moody(sample: Sample) -> float:
    """Whatever the text says."""
    await asyncio.sleep(0)
    if sample.text == "raises":
        raise LookupError("lost")
    if sample.text == "exits":
        sys.exit(0)
    if sample.text == "hangs":
        await asyncio.Event().wait()
    if sample.text == "blocks":
        import time

        time.sleep(1000)
    if sample.text == "forks" and os.fork():
        os.wait()
    if sample.text == "nan":
        return float("nan")
    return 1.0


async def forks_at_once(sample: Sample) -> float:
    """Each notes its index, the first before it forks and the others afterwards, when all are under way."""
    for _ in range(9 if sample.index else 2):
        await asyncio.sleep(0)
    with open(sample.text, "a") as file:
        file.write(str(sample.index))
    if sample.index == 0 and os.fork():
        os.wait()
    return 1.0


def listed(samples: list[Sample]) -> list[object]:
    return [(sample.index, f"one of {len(samples)}") for sample in samples]


async def listed_async(samples: list[Sample]) -> list[float]:
    return [sample.index for sample in samples]


def too_few(samples: list[Sample]) -> list[float]:
    return [1.0] * (len(samples) - 1)


def leaves_at(sample: Sample) -> float:
    if sample.text == "leave":
        os._exit(3)
    return os.getpid()


def of_columns(completions, answer, **row):
    """As TRL calls a reward function."""
    return [0.0 for _ in completions]


def of_lists(samples, answer):
    return [0.0 for _ in samples]


def with_answer(function):
    @functools.wraps(function)
    def called(sample):
        return function(sample.text, sample.prompt.answer)

    return called


@with_answer
def decorated(text, answer):
    return float(len(text) + len(answer))
