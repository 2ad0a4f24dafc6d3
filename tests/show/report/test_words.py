"""What the report says of a run in words: how far it is, what stopped it, what moved it, and what would be faster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runs_made import lines, made_run

from grpo_mega.show.report.pack import pack
from grpo_mega.show.report.read import RunData, read_run
from grpo_mega.show.report.words import chain, headline, sentences, time_words


def test_a_run_in_an_earlier_stage_says_which(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    for name in ("metrics.jsonl", "summary.json"):
        (run / name).unlink()
    (run / "pretrain.jsonl").write_text(lines([{"step": 400, "base/loss": 1.0}]))
    assert headline(read_run(run)) == "The run is in an earlier stage, supervised fine-tuning (sft): step 3."
    (run / "sft.jsonl").unlink()
    assert headline(read_run(run)) == "The run is in an earlier stage, the base model's training (pretrain): step 400."
    (run / "summary.json").write_text(json.dumps({"status": "completed"}))
    assert headline(read_run(run)) == "The run ended with the base model's training (pretrain), after 400 steps."
    (run / "pretrain.jsonl").unlink()
    assert headline(read_run(run)) == "No training step is recorded yet."


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
    assert sentences(read_run(run))[0].endswith(f"2 problems, 4 answers each, and {moved}")


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


def test_the_mean_of_a_penalty_is_no_share(tmp_path: Path) -> None:
    terms = [{"name": "repetition", "function": None, "kind": ""}]
    run = judged(tmp_path, {"terms": terms, "success": "repetition"}, -0.5, -0.4, 100)
    assert "rose from -0.5 to -0.4" in headline(run)


def test_a_score_is_named_and_no_percentage(tmp_path: Path) -> None:
    """A judge's 0 to 10 is no accuracy of 625 %."""
    terms = [{"name": "helpful", "function": None, "kind": "judge"}]
    run = judged(tmp_path, {"terms": terms, "success": "helpful"}, 3.5, 6.25, 400)
    assert headline(run) == "The score 'helpful' on problems it never trained on rose from 3.5 to 6.25 in 3 steps."


@pytest.mark.parametrize(
    ("before", "after", "problems", "expected"),
    [
        (0.0, 0.125, 24, "went from 0% to 12.5% in 3 steps, which is within the noise of 24 problems."),
        (0.0, 0.125, 240, "rose from 0% to 12.5% in 3 steps."),
        (0.5, 0.45, 100, "went from 50% to 45% in 3 steps, which is within the noise of 100 problems."),
        (0.5, 0.5, 100, "stayed at 50% in 3 steps."),
        (0.1, 0.9, None, "rose from 10% to 90% in 3 steps."),
    ],
)
def test_a_change_within_noise_is_no_rise(
    tmp_path: Path, before: float, after: float, problems: int | None, expected: str
) -> None:
    terms = [{"name": "accuracy", "function": None, "kind": ""}]
    run = judged(tmp_path, {"terms": terms, "success": "accuracy"}, before, after, problems)
    assert headline(run) == f"Accuracy on problems it never trained on {expected}"


def judged(root: Path, reward: dict[str, Any], before: float, after: float, problems: int | None) -> RunData:
    """A run of three steps with these results."""
    (root / "config.yaml").write_text(json.dumps({"reward": reward}))
    results = {"held_out_accuracy_before": before, "held_out_accuracy_after": after, "held_out_problems": problems}
    (root / "summary.json").write_text(json.dumps({"status": "completed", **results}))
    (root / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3)))
    return read_run(root)
