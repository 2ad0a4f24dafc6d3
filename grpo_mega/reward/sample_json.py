"""JSON form of a sample for users' programs and services."""

from __future__ import annotations

from typing import Any

from grpo_mega.types import Sample


def sample_json(sample: Sample) -> dict[str, Any]:
    """The sample's fields as JSON types; `tokens` is the number of sampled tokens."""
    prompt = sample.prompt
    return {
        "id": prompt.id,
        "index": sample.index,
        "task": prompt.task,
        "prompt": prompt.text,
        "answer": prompt.answer,
        "metadata": prompt.metadata,
        "completion": sample.text,
        "finish_reason": sample.finish_reason,
        "tokens": len(sample.token_ids),
    }
