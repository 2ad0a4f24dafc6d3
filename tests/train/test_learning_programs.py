"""Runs whose rewards come from programs in the sandbox: a short one, and those that learn."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from metric_lines import of_steps
from train_jobs import SMALL, Job

SHORT = ["base.tagged=1", "base.gate_from=120", "base.max_steps=120", "base.lr=3e-3", "rollout.max_new_tokens=48"]
"""A base model of a few seconds, which writes programs in answer tags, most of them wrong."""


def run(folder: Path, overrides: list[str]) -> Path:
    name = "learning"
    ended = Job(folder, [*overrides, f"run.name={name}"], ranks=2).finish()
    assert (ended.code, ended.orphans) == (0, []), ended.stderr
    return folder / "runs" / name


def samples(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in (path / "samples").glob("*.jsonl") for line in file.read_text().splitlines()]


@pytest.mark.long
def test_programs_are_run_against_the_hidden_tests_of_their_prompts(tmp_path: Path) -> None:
    words = ["experiment=tiny_mixture", *SMALL[1:], *SHORT, "run.steps=2", "run.sample_groups_per_step=8"]
    path = run(tmp_path, words)
    shown = samples(path)
    programs = [record for record in shown if "def" in record["answer"]]
    assert len(programs) >= 8
    assert len(shown) > len(programs)
    verdicts = [re.search(r"code: (passed 2 tests|test \d of 2: \w+)", r.get("reason", "")) for r in programs]
    assert sum(map(bool, verdicts)) > len(programs) / 2, programs
    for record in shown:
        assert ("code" in record) == ("def" in record["answer"]) != ("accuracy" in record)
        assert record.get("code", 0.0) == float("passed 2 tests" in record.get("reason", ""))
    for record in of_steps(path):
        assert record["reward/unscorable"] == 0
        assert {"reward/chain_sum/total", "reward/tiny_code/total", "reward/code", "reward/accuracy"} <= record.keys()


@pytest.mark.long
def test_a_policy_learns_to_write_programs(tmp_path: Path) -> None:
    """Numbers of five seeds are in docs/tiny.md."""
    path = run(tmp_path, ["experiment=tiny_code"])
    summary = json.loads((path / "summary.json").read_text())
    assert summary["held_out_accuracy_before"] < 0.15
    assert summary["held_out_accuracy_after"] >= 0.7
