"""Writes experts.jsonl: the tokens of each expert in a step, over those of the average expert of its layer.

A line is {"step": 4, "loads": {"2": [0.9, 1.2, ...]}}: the number of a layer, and a number for each of its experts, in
the step's last update. The file has about `MOST_BYTES` at most: of a longer run it keeps every second, fourth, eighth
step and so on, evenly over the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_mega.platform.files import write_atomic

EXPERTS = "experts.jsonl"
MOST_BYTES = 10_000_000
BYTES_PER_EXPERT = 6
MOST_LINES, FEWEST_LINES = 256, 16

Loads = Mapping[str, Sequence[float]]
"""Number of a layer -> tokens that each of its experts got."""


class ExpertLog:
    """Writes experts.jsonl of a run."""

    def __init__(self, run_dir_path: Path, resume_from_step: int) -> None:
        """Continues the file after this step; lines of later steps, which run again, are removed. -1 begins it anew."""
        self._path = run_dir_path / EXPERTS
        self._lines = {step: line for step, line in read_lines(self._path).items() if step <= resume_from_step}
        if self._path.exists():
            self._rewrite()

    def write(self, step: int, loads: Loads) -> None:
        """Records a step if it is among those that are kept; writes nothing for a model without experts."""
        if not loads or step % (every := spacing(step, sum(map(len, loads.values())))):
            return
        shares = {}
        for layer, tokens in loads.items():
            average = sum(tokens) / len(tokens)
            shares[layer] = [float(f"{own / average:.3g}") if average else 0.0 for own in tokens]
        line = json.dumps({"step": step, "loads": shares})
        kept = {old: text for old, text in self._lines.items() if old % every == 0}
        thinned = len(kept) < len(self._lines)
        self._lines = kept | {step: line}
        if thinned:
            self._rewrite()
        else:
            with self._path.open("a") as file:
                file.write(line + "\n")

    def _rewrite(self) -> None:
        write_atomic(self._path, "".join(line + "\n" for line in self._lines.values()))


def spacing(step: int, experts: int) -> int:
    """Distance between kept steps once a run has reached `step`; `experts` is the total over all layers."""
    most = min(max(MOST_BYTES // (BYTES_PER_EXPERT * experts), FEWEST_LINES), MOST_LINES)
    every = 1
    while step > most * every:
        every *= 2
    return every


def read_lines(path: Path) -> dict[int, str]:
    """Step -> its line, without half-written lines, as a crash leaves the last one."""
    lines = {}
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            record: Any = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            lines[record["step"]] = line
    return lines
