"""Reward functions that the runs of these tests import by path."""

from __future__ import annotations

from grpo_mega.types import Sample


def varied(sample: Sample) -> float:
    """0, 0.5 or 1, for random weights are never right."""
    return sum(sample.token_ids) % 3 / 2


def read(sample: Sample) -> float:
    """0, 0.5 or 1, by the text of a completion and its problem."""
    return (len(sample.text) + len(sample.prompt.text)) % 3 / 2
