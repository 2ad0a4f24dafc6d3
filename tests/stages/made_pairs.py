"""Pairs of completions of sums for tests: the preferred one is right and in answer tags."""

from __future__ import annotations

import json
from pathlib import Path


def made_pair(number: int) -> dict[str, str]:
    """Pair `number`. Below 1,000 every number gives a different prompt; lengths of rejected completions vary."""
    terms = [int(digit) + 1 for digit in f"{number:03}"]
    terms = [min(term, 9) for term in terms] + [number % 7]
    right = str(sum(terms))
    wrong = str(sum(terms) + 1 + number % 3) * (1 + number % 2)
    return {
        "prompt": f"{number % 10}+" + "+".join(map(str, terms)) + "=?",
        "chosen": f"<answer>{right}</answer>",
        "rejected": f"<think>{wrong}</think>{wrong}" if number % 2 else wrong,
    }


def write_pairs(path: Path, numbers: range) -> Path:
    """A file of the pairs of these numbers."""
    path.write_text("".join(json.dumps(made_pair(number)) + "\n" for number in numbers))
    return path
