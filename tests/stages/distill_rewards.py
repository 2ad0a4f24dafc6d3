"""The reward that distill_steps_job.py names by import path."""

from __future__ import annotations

from grpo_mega.types import Sample


def none_of_some(sample: Sample) -> float:
    """The same for every completion, and none at all for those that begin with an odd token."""
    if sample.token_ids[0] % 2:
        raise ValueError("no reward for this one")
    return 1.0
