"""Selects lines of a run's metrics.jsonl, and refuses metrics that docs/metrics.md does not explain."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from grpo_mega.observe.metric_table import unknown
from grpo_mega.observe.metrics import read_metrics


def of_steps(run: Path) -> list[dict[str, Any]]:
    """The lines of the training steps."""
    return [line for line in _explained(run) if "reward/mean" in line]


def held_out(run: Path) -> list[dict[str, Any]]:
    """The lines of evaluations on the held-out problems."""
    return [line for line in _explained(run) if "reward/mean" not in line]


def repeated(line: dict[str, Any]) -> dict[str, Any]:
    """What of a line is the same when the run is repeated: all but seconds, speed and memory."""
    return {name: value for name, value in line.items() if not name.startswith(("time/", "machine/"))}


def unexplained(lines: Iterable[dict[str, Any]]) -> set[str]:
    """Metrics of these lines, or of metrics without a step, that docs/metrics.md does not explain."""
    return {name for line in lines for name in unknown(line.keys() - {"step"})}


def _explained(run: Path) -> list[dict[str, Any]]:
    lines = read_metrics(run / "metrics.jsonl")
    assert not unexplained(lines)
    return lines
