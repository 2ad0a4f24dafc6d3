"""Time and memory of a step: seconds by phase, throughput, peak memory, and whether a rank is slow.

They differ when a run is repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median_low
from typing import NamedTuple

from grpo_mega.observe.timer import Seconds

APART = ("evaluate", "checkpoint", "export")
"""Phases that are not part of a step; those of "checkpoint" and "export" belong to all steps before."""
LEARNING = ("update", "sft", "base", "reward_model")
"""Phases in which a model learns, of which the first that a step has counts; the last is of a reward model's run."""


class Use(NamedTuple):
    """What a step cost a rank."""

    peak_bytes: int
    """Peak memory since the process began."""
    flops: float
    """Floating-point operations of learning in its part of the models (`Model.flops`)."""
    working: float
    """Seconds in which it did not wait for others."""


def step_seconds(spent: Mapping[str, Seconds]) -> dict[str, float]:
    """Wall-clock seconds of a step by phase, and their sum without the phases of `APART`."""
    total = sum(seconds.wall for phase, seconds in spent.items() if phase not in APART)
    return {**{f"time/{phase}": seconds.wall for phase, seconds in spent.items()}, "time/step": total}


def working_seconds(spent: Mapping[str, Seconds]) -> float:
    """Seconds of a step in which this rank did not wait for others."""
    return sum(seconds.wall - seconds.waited for phase, seconds in spent.items() if phase not in APART)


def throughput(tokens: float | None, seconds: Mapping[str, float]) -> dict[str, float]:
    """Tokens per second of a step, sampled and learned from.

    {} if it sampled none, or sampled before the run was stopped and continued, which these seconds do not cover.
    """
    if tokens is None or not seconds.get("time/generate"):
        return {}
    return {"machine/tokens_per_second": tokens / seconds["time/step"]}


def use_of_ranks(uses: Sequence[Use], seconds: Mapping[str, float], peak_tflops: float | None) -> dict[str, float]:
    """Peak memory, learning speed and slowest rank of a step.

    Args:
        uses: Costs of each rank, in order.
        seconds: Seconds of the main rank, see `step_seconds`.
        peak_tflops: Peak of the device of a rank; None if unknown.
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
