"""Selects lines of a run's metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_mega.observe.metrics import read_metrics


def of_steps(run: Path) -> list[dict[str, Any]]:
    """The lines of the training steps."""
    return [line for line in read_metrics(run / "metrics.jsonl") if "reward/mean" in line]


def held_out(run: Path) -> list[dict[str, Any]]:
    """The lines of evaluations on the held-out problems."""
    return [line for line in read_metrics(run / "metrics.jsonl") if "reward/mean" not in line]
