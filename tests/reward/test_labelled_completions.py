r"""Whole completions (`completions.jsonl`), labelled by hand before the verifier saw them: is the final answer right?

They are written as models write, in the styles of MATH, GSM8K, AIME, OlympiadBench, NuminaMath, Big-Math, gaokao and
physics problems; `pairs.txt` states the conventions of the labels. What counts is the last box after the thoughts, with
the boxes of the same sentence.
"""

from __future__ import annotations

import json
import logging
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import math_verify
import pytest

from grpo_mega.config.schema.terms import StrictOptions
from grpo_mega.reward.answers import boxed_accuracy
from grpo_mega.types import Prompt, Sample

LEAST_PRECISION, LEAST_RECALL = 0.995, 0.95
ROWS: list[dict[str, Any]] = [
    json.loads(line) for line in Path(__file__).with_name("completions.jsonl").read_text().splitlines()
]


def ours(row: dict[str, Any]) -> bool:
    prompt = Prompt("p/1", (), "", row["truth"], "math")
    sample = Sample(prompt, 0, array("i"), array("f"), "stop", ((0, 0),), row["completion"])
    return boxed_accuracy(sample, StrictOptions()).value == 1


def alone(row: dict[str, Any]) -> bool:
    """Verdict of math-verify, as its README calls it."""
    return math_verify.verify(math_verify.parse(f"${row['truth']}$"), math_verify.parse(row["completion"]))


def score(verdicts: list[bool]) -> tuple[float, float]:
    """(precision, recall)."""
    kinds = Counter((verdict, row["right"]) for verdict, row in zip(verdicts, ROWS, strict=True))
    hits = kinds[True, True]
    return hits / (hits + kinds[True, False]), hits / (hits + kinds[False, True])


def test_right_answers_earn_their_reward_and_wrong_ones_none() -> None:
    verdicts = [ours(row) for row in ROWS]
    wrong = [row for verdict, row in zip(verdicts, ROWS, strict=True) if verdict != row["right"]]
    precision, recall = score(verdicts)
    assert len(ROWS) > 500
    assert precision >= LEAST_PRECISION, wrong
    assert recall >= LEAST_RECALL, wrong


@pytest.mark.long
def test_table_of_completions_beside_math_verify(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the table of docs/rewards.md."""
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    scores = {
        name: score([judge(row) for row in ROWS]) for name, judge in (("grpo_mega", ours), ("math-verify", alone))
    }
    with capsys.disabled():
        print("\n| verifier | completions | precision | recall |\n| --- | --- | --- | --- |")
        for name, (precision, recall) in scores.items():
            print(f"| {name} | {len(ROWS)} | {precision:.3f} | {recall:.3f} |")
    assert scores["grpo_mega"] > scores["math-verify"]
