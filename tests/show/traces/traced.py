"""Traces of ranks made for tests: spans of given times, as `platform/trace.py` writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Span = tuple[str, float, float]
"""Name, begin and end in seconds."""
PHASES = {"step", "generate", "update", "evaluate", "sync", "reward", "logprobs", "reward_model"}


def events(rank: int, spans: Sequence[Span], samples: Sequence[Span] = (), stage: str = "grpo") -> list[dict[str, Any]]:
    """Steps are numbered in their order, from 1; events come in the order in which a run writes them."""
    found, steps = [], 0
    for order, (name, begin, end) in enumerate(spans):
        common: dict[str, Any] = {"name": name, "pid": rank, "tid": 0}
        if name in PHASES:
            steps += name == "step"
            args = {"step": steps, "stage": stage} if name == "step" else {}
            found.append((begin, 1, order, {**common, "ph": "B", "ts": begin * 1e6, "args": args}))
            found.append((end, 0, -order, {**common, "ph": "E", "ts": end * 1e6}))
        else:
            found.append((end, 0, -order, {**common, "ph": "X", "ts": begin * 1e6, "dur": (end - begin) * 1e6}))
    for name, begin, end in samples:
        common = {"name": name, "cat": "sample", "id": f"{name} @{begin}", "pid": rank, "tid": 0}
        found.append((end, 0, -1000, {**common, "ph": "b", "ts": begin * 1e6}))
        found.append((end, 0, -1000, {**common, "ph": "e", "ts": end * 1e6}))
    return [event for *_, event in sorted(found, key=lambda one: one[:3])]


def write(run: Path, rank: int, found: Sequence[dict[str, Any]]) -> None:
    """The file of a rank, in a run directory; its array is not closed."""
    folder = run / "trace"
    folder.mkdir(parents=True, exist_ok=True)
    name = {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
    lines = "".join(json.dumps(event) + ",\n" for event in [name, *found])
    (folder / f"rank-{rank:05d}.json").write_text("[\n" + lines)
