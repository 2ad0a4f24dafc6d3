"""Runs whose policy calls a tool: a short one, and one that learns to."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from metric_lines import of_steps
from train_jobs import SMALL, Job

from grpo_mega.environment.calculator import calculate

SHORT = ["base.tagged=1", "base.gate_from=150", "base.max_steps=150", "base.lr=3e-3", "rollout.max_new_tokens=48"]
"""A base model of a few seconds, which writes in answer tags and often calls the calculator."""
CALL = re.compile(r"\[([1-9][0-9]*(?:\*[1-9][0-9]*)*)\]([^;]*);")
"""A product that Python and the calculator both take: in Python, no number begins with 0."""


def run(folder: Path, overrides: list[str]) -> Path:
    ended = Job(folder, [*overrides, "run.name=learning"], ranks=2).finish()
    assert (ended.code, ended.orphans) == (0, []), ended.stderr
    return folder / "runs" / "learning"


@pytest.mark.long
@pytest.mark.parametrize("experiment", ["tiny_tool", "tiny_python"])
def test_calls_of_the_policy_are_answered(tmp_path: Path, experiment: str) -> None:
    more = ["run.steps=6", "run.sample_groups_per_step=8"]
    path = run(tmp_path, [f"experiment={experiment}", *SMALL[1:], *SHORT, *more])
    shown = [json.loads(line) for file in (path / "samples").glob("step*") for line in file.read_text().splitlines()]
    calls = [call for record in shown for call in CALL.findall(record["completion"])]
    assert len(calls) >= 8
    # Whatever it asked, as such a small model often asks for another product than that of the problem.
    assert [reply for _, reply in calls] == [calculate(expression) for expression, _ in calls]
    assert all(record["reward/unscorable"] == 0 for record in of_steps(path))


@pytest.mark.long
def test_a_policy_learns_to_halve_what_is_left(tmp_path: Path) -> None:
    path = run(tmp_path, ["experiment=tiny_guess"])
    summary = json.loads((path / "summary.json").read_text())
    assert summary["held_out_accuracy_before"] < 0.3
    assert summary["held_out_accuracy_after"] >= 0.5


@pytest.mark.long
@pytest.mark.parametrize("environment", ["calculator", "calculating_agent", "none"])
def test_a_policy_learns_to_call_a_calculator_without_which_it_learns_nothing(tmp_path: Path, environment: str) -> None:
    """Numbers of five seeds are in docs/tiny.md."""
    path = run(tmp_path, ["experiment=tiny_tool", f"environment={environment}"])
    summary = json.loads((path / "summary.json").read_text())
    assert summary["held_out_accuracy_before"] < 0.05
    after = summary["held_out_accuracy_after"]
    assert after < 0.05 if environment == "none" else after >= 0.9
