"""A reward for tests: whether a completion is short, which what likes length does not bring about."""

from grpo_mega.types import Sample

SHORT = 12
"""Tokens."""


def short(sample: Sample) -> float:
    """1 for a completion that ended by itself before so many tokens."""
    return float(sample.finish_reason == "stop" and len(sample.token_ids) < SHORT)
