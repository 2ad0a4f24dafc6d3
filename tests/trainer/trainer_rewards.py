"""The reward of the trainer tests, imported by path."""

from __future__ import annotations

from grpo_mega.types import Sample

equal = False
"""Whether every sample gets the same reward."""


def scored(sample: Sample) -> float:
    """Some number that differs between samples, unless all are to be equal."""
    return 1.0 if equal else float(sum(sample.token_ids) % 5)
