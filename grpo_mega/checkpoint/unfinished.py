"""Samples that were not finished when a checkpoint was written, as plain JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from grpo_mega.types import Prompt, Sample


def to_json(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """One JSON object per sample, without its experts: a batch has them, and they are a thousand numbers per token."""
    return [asdict(replace(sample, experts=None)) for sample in samples]


def from_json(records: Sequence[dict[str, Any]]) -> list[Sample]:
    """The samples that `to_json` was given, equal in every bit but for their experts."""
    return [Sample(**_tuples(record | {"prompt": Prompt(**_tuples(record["prompt"]))})) for record in records]


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with tuples for lists, also within each other: JSON has no tuples."""
    return {name: _tuple(value) for name, value in fields.items()}


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value
