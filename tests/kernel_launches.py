"""Counts the launches of `grpo_kernels` by the names that they have in torch's profiler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from torch.profiler import ProfilerActivity, profile

PREFIX = "grpo_kernels::"


@contextmanager
def launches() -> Iterator[Counter[str]]:
    """{operation: how often it was launched}, complete when the block is left."""
    counted: Counter[str] = Counter()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        yield counted
    names = [event.name for event in profiled.events()]
    counted.update(name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX))


ONE_LAUNCH = {"grpo_rows_": 1}
TWO_LAUNCHES = {"row_stats": 1, "row_gradient_": 1}
LAUNCHES = {"ppo": ONE_LAUNCH, "cispo": ONE_LAUNCH, "gspo": TWO_LAUNCHES}


def per_chunk(counted: Counter[str], chunks: int) -> dict[str, float]:
    """{operation: launches per chunk}"""
    return {name: count / chunks for name, count in counted.items()}
