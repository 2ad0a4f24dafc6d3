"""Completions to look at: samples/step-NNNNNN.jsonl, a few of every step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grpo_mega.platform.files import write_atomic
from grpo_mega.types import Group


def write_samples(run_dir_path: Path, step: int, records: list[dict[str, Any]]) -> Path:
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


def sample_records(groups: list[Group], count: int) -> list[dict[str, Any]]:
    """The first sample of the first `count` groups, as samples/ shows them."""
    return [
        {
            "prompt_id": group.prompt.id,
            "prompt": group.prompt.text,
            "answer": group.prompt.answer,
            "completion": group.samples[0].text,
            "reward": group.rewards[0],
            **group.scores[0].terms,
            **({"reason": group.scores[0].reason} if group.scores[0].reason else {}),
            "tokens": len(group.samples[0].token_ids),
            "finish_reason": group.samples[0].finish_reason,
            "policy_version": group.samples[0].policy_version,
        }
        for group in groups[:count]
    ]
