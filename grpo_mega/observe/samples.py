"""Completions to look at: samples/step-NNNNNN.jsonl, a few of every step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_mega.platform.files import write_atomic
from grpo_mega.types import Sample, Score


def write_samples(run_dir_path: Path, step: int, records: Sequence[dict[str, Any]]) -> Path:
    """Writes one JSON object per record to samples/ and returns the file; a step that runs again replaces its file.

    Raises:
        ValueError: A record holds something JSON does not know (a tensor, NaN); names the step and the record.
    """
    path = run_dir_path / "samples" / f"step-{step:06d}.jsonl"
    path.parent.mkdir(exist_ok=True)
    lines = [_line(record, f"sample {index} of step {step}") for index, record in enumerate(records)]
    write_atomic(path, "".join(lines))
    return path


def _line(record: dict[str, Any], where: str) -> str:
    try:
        return json.dumps(record, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} cannot be written as JSON: {error}") from None


def sample_record(sample: Sample, score: Score) -> dict[str, Any]:
    """A sample as samples/ shows it; one without a score has no reward (null)."""
    return {
        "prompt_id": sample.prompt.id,
        "prompt": sample.prompt.text,
        "answer": sample.prompt.answer,
        "completion": sample.text,
        "reward": None if score.unscorable else score.total,
        **score.terms,
        **({"reason": score.reason} if score.reason else {}),
        **({"unscorable": score.unscorable} if score.unscorable else {}),
        "tokens": len(sample.token_ids),
        "finish_reason": sample.finish_reason,
        "policy_version": sample.policy_version,
    }
