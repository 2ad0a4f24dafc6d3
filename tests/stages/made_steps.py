"""Worked sums whose steps have labels for tests: a step is right when its sum is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def made_completion(number: int) -> dict[str, Any]:
    """A completion whose prompt no other number below 1000 has; its second step, and what follows it, may be wrong."""
    a, b, c = 1 + number % 7, 2 + number // 7 % 5, 1 + number // 35
    first, wrong = a + b, number % 3 == 0
    second = first + c + (2 if wrong else 0)
    steps = [f"<think>{a}+{b}={first}", f"{first}+{c}={second}", f"<answer>{second}</answer>"]
    return {
        "prompt": f"{a}+{b}+{c}=?",
        "completion": f"{steps[0]};{steps[1]}</think>{steps[2]}",
        "steps": steps,
        "labels": [1, 0 if wrong else 1, 0 if wrong else 1],
    }


def write_completions(path: Path, numbers: range) -> Path:
    """A file of the completions of these numbers."""
    path.write_text("".join(json.dumps(made_completion(number)) + "\n" for number in numbers))
    return path
