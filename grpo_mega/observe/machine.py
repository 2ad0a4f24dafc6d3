"""What the machines took for a step: seconds by phase, speed, memory, and whether one is slow. A repeated run has other
numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median_low
from typing import NamedTuple

from grpo_mega.observe.timer import Seconds

APART = ("evaluate", "checkpoint", "export")
"""Phases that are no part of a step: the time of the latter two is that of the steps before."""
LEARNING = ("update", "sft", "base", "reward_model")
"""Phases in which models learn, the first that a step has; the last one is that of a reward model's own run."""


class Use(NamedTuple):
    """What a rank took for a step."""

    peak_bytes: int
    """Memory at its peak since the process began."""
    flops: float
    """Operations that its part of the models has learned with (`Model.flops`)."""
    working: float
    """Seconds in which it did not wait for others."""


def step_seconds(spent: Mapping[str, Seconds]) -> dict[str, float]:
    """Wall seconds of a step by phase, and in total without those of `APART`."""
    total = sum(seconds.wall for phase, seconds in spent.items() if phase not in APART)
    return {**{f"time/{phase}": seconds.wall for phase, seconds in spent.items()}, "time/step": total}


def working_seconds(spent: Mapping[str, Seconds]) -> float:
    """Seconds of a step in which this rank did not wait for others."""
    return sum(seconds.wall - seconds.waited for phase, seconds in spent.items() if phase not in APART)


def throughput(tokens: float | None, seconds: Mapping[str, float]) -> dict[str, float]:
    """Tokens that a step sampled and learned from, a second; {} where it sampled none, or did so before a stop that
    these seconds do not cover."""
    if tokens is None or not seconds.get("time/generate"):
        return {}
    return {"machine/tokens_per_second": tokens / seconds["time/step"]}


def use_of_ranks(uses: Sequence[Use], seconds: Mapping[str, float], peak_tflops: float | None) -> dict[str, float]:
    """Memory, speed of learning and the slowest rank, of what all ranks took for a step.

    Args:
        uses: By rank.
        seconds: Of the main rank, see `step_seconds`.
        peak_tflops: What the device of a rank can do at most, where that is known.
    """
    found = {"machine/peak_memory_gb": max(use.peak_bytes for use in uses) / 1e9}
    learned = next((seconds[f"time/{phase}"] for phase in LEARNING if seconds.get(f"time/{phase}")), None)
    flops = mean(use.flops for use in uses)
    if learned and flops:
        found["machine/tflops"] = flops / learned / 1e12
        if peak_tflops is not None:
            found["machine/mfu"] = found["machine/tflops"] / peak_tflops
    working = [use.working for use in uses]
    usual = median_low(working)
    if len(uses) > 1 and usual > 0:
        found["machine/straggling"] = max(working) / usual
        found["machine/slowest_rank"] = working.index(max(working))
    return found
