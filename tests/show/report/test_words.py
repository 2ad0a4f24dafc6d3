"""What the report says of a run in words: how far it is, what stopped it, what moved it, and what would be faster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runs_made import lines, made_run

from grpo_mega.show.report.pack import pack
from grpo_mega.show.report.read import read_run
from grpo_mega.show.report.words import chain, headline, sentences, time_words

STEPS = [{"step": step} for step in (1, 2, 3)]
PRETRAIN = {"pretrain.jsonl": [{"step": 400, "base/loss": 1.0}]}
SFT = {"sft.jsonl": [{"step": 3, "sft/loss": 1.0}]}
NEVER = "on problems it never trained on"


def judged(name: str, before: float, after: float, problems: int | None, kind: str = "") -> dict[str, Any]:
    """Files of a run of three steps whose success is this term, with its means before and after."""
    results = {"held_out_accuracy_before": before, "held_out_accuracy_after": after, "held_out_problems": problems}
    return {
        "config.yaml": {"reward": {"terms": [{"name": name, "function": None, "kind": kind}], "success": name}},
        "summary.json": {"status": "completed", **results},
        "metrics.jsonl": STEPS,
    }


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, "No training step is recorded yet."),
        (PRETRAIN, "The run is in an earlier stage, the base model's training (pretrain): step 400."),
        (PRETRAIN | SFT, "The run is in an earlier stage, supervised fine-tuning (sft): step 3."),
        (
            PRETRAIN | {"summary.json": {"status": "completed"}},
            "The run ended with the base model's training (pretrain), after 400 steps.",
        ),
        # A change within the noise is not called a rise.
        (
            judged("accuracy", 0.0, 0.125, 24),
            f"Accuracy {NEVER} went from 0% to 12.5% in 3 steps, which is within the noise of 24 problems.",
        ),
        (judged("accuracy", 0.0, 0.125, 240), f"Accuracy {NEVER} rose from 0% to 12.5% in 3 steps."),
        (
            judged("accuracy", 0.5, 0.45, 100),
            f"Accuracy {NEVER} went from 50% to 45% in 3 steps, which is within the noise of 100 problems.",
        ),
        (judged("accuracy", 0.5, 0.5, 100), f"Accuracy {NEVER} stayed at 50% in 3 steps."),
        (judged("accuracy", 0.1, 0.9, None), f"Accuracy {NEVER} rose from 10% to 90% in 3 steps."),
        # Neither the mean of a penalty nor a judge's score from 0 to 10 is a percentage.
        (judged("repetition", -0.5, -0.4, 100), f"The score 'repetition' {NEVER} rose from -0.5 to -0.4 in 3 steps."),
        (
            judged("helpful", 3.5, 6.25, 400, kind="judge"),
            f"The score 'helpful' {NEVER} rose from 3.5 to 6.25 in 3 steps.",
        ),
    ],
)
def test_the_headline(tmp_path: Path, files: dict[str, Any], expected: str) -> None:
    for name, told in {"config.yaml": {}, **files}.items():
        (tmp_path / name).write_text(lines(told) if name.endswith(".jsonl") else json.dumps(told))
    assert headline(read_run(tmp_path)) == expected


def test_an_alarm_that_stopped_the_run_is_its_status(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    assert dict(pack([read_run(run)])["runs"][0]["facts"])["Status"] == "completed"
    (run / "summary.json").write_text(json.dumps({"status": "stopped", "stopped_by": "kl_high"}))
    assert dict(pack([read_run(run)])["runs"][0]["facts"])["Status"] == "stopped by the alarm kl_high"


@pytest.mark.parametrize(
    ("distill", "moved"),
    [
        ({"teacher": None}, "made the better ones more likely."),
        ({"teacher": "runs/large"}, "moved towards what its teacher finds likely."),
        (
            {"teacher": "runs/large", "reward_coef": 0.5},
            "made the better ones more likely, and moved towards what its teacher finds likely.",
        ),
    ],
)
def test_a_teacher_moves_the_policy_too(tmp_path: Path, distill: dict[str, object], moved: str) -> None:
    run = made_run(tmp_path / "run", distill=distill)
    assert sentences(read_run(run))[0].endswith(f"4 completions of each of 2 problems and {moved}")


def test_advice_is_for_runs_that_train_a_policy() -> None:
    phases = {"reward_model": 9.0, "sync": 1.0}
    spent = "90% of the time of the steps goes into the phase “reward_model”."
    assert time_words(phases, {"run": {"trains": "reward_model"}}) == spent
    assert time_words(phases, {}, traced=True) == spent
    advised = f"{spent} The reward model bounds a step: a smaller one shortens it."
    assert time_words(phases, {"run": {"trains": "policy"}}) == time_words(phases, {}) == advised


def test_the_chain_of_stages_begins_with_the_first_weights_and_tells_what_this_run_did_not_do(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", run={"init_from": "runs/base/checkpoints/step-000004"})
    assert chain(read_run(run)).startswith(
        "the weights of runs/base/checkpoints/step-000004 → supervised fine-tuning (3 steps, 25 min) → "
        "reinforcement learning (8 steps, "
    )
    (run / "pretrain.jsonl").write_text("")
    (run / "metrics.jsonl").unlink()
    assert chain(read_run(run)).partition(" → ")[2] == (
        "the base model's training (no step in this run) → supervised fine-tuning (3 steps, 25 min)"
    )
