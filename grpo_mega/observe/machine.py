"""What the machines took for a step: seconds by phase, tokens a second, memory. A repeated run has other numbers."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_mega.observe.timer import Seconds
from grpo_mega.platform import Platform, peak_memory_bytes
from grpo_mega.platform.collectives import from_all_ranks

APART = ("evaluate", "checkpoint", "export")
"""Phases that are no part of a step: the time of the latter two is that of the steps before."""


def step_seconds(spent: Mapping[str, Seconds]) -> dict[str, float]:
    """Wall seconds of a step by phase, and in total without those of `APART`."""
    total = sum(seconds.wall for phase, seconds in spent.items() if phase not in APART)
    return {**{f"time/{phase}": seconds.wall for phase, seconds in spent.items()}, "time/step": total}


def throughput(tokens: float | None, seconds: Mapping[str, float]) -> dict[str, float]:
    """Tokens that a step sampled and learned from, a second; {} where it sampled none, or did so before a stop that
    these seconds do not cover."""
    if tokens is None or not seconds.get("time/generate"):
        return {}
    return {"machine/tokens_per_second": tokens / seconds["time/step"]}


def peak_memory(platform: Platform) -> dict[str, float]:
    """The memory of the rank that had most at its peak, in 10^9 bytes; every rank must call it."""
    return {"machine/peak_memory_gb": max(from_all_ranks(lambda: peak_memory_bytes(platform))) / 1e9}
