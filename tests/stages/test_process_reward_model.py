"""A process reward model's run, and the reward of steps that it gives in another: bit for bit, and as it is asked."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import run_python
from made_pairs import write_pairs
from made_steps import write_completions
from metric_lines import of_steps, unexplained
from ranks import REPOSITORY, results, run_ranks

from grpo_mega.observe.metrics import read_metrics

JOB = Path(__file__).with_name("reward_model_job.py")
STEPS = 6
"""Two passes over 22 completions, eight at a time: the last step has four."""
SEPARATORS = 'pairs.separators=[";","</think>"]'


def model_of(root: Path, name: str, *more: str) -> list[str]:
    return [
        *("run.trains=process_reward_model", "model=tiny_moe", "data.tokenizer=chars", f"run.root={root}"),
        *(f"pairs.path={root}/steps.jsonl", f"pairs.test_path={root}/test.jsonl", SEPARATORS, f"run.name={name}"),
        *("pairs.epochs=2", "pairs.batch_size=8", "pairs.warmup_steps=2", "pairs.lr=3e-3", "pairs.save_every=0"),
        *("run.eval_every=2", "run.tensorboard=false", "run.print_every=1", "layout=single"),
        *more,
    ]


def policy_of(root: Path, name: str, *more: str) -> list[str]:
    return [
        *("experiment=tiny", "base=none", "layout=single", f"run.root={root}", f"run.name={name}", "run.steps=2"),
        *("run.eval_every=0", "run.tensorboard=false", "data.validation_size=10", "data.test_size=10"),
        *("algorithm.prompts_per_step=4", "algorithm.group_size=4", "rollout.max_new_tokens=24"),
        *("run.export_every=0", "run.print_every=1", f"run.init_from={root}/start/checkpoints/step-000000"),
        *("reward.terms=[]", f"reward.model.path={root}/one", "algorithm.supervision=process"),
        *more,
    ]


def ran(tasks: dict[str, tuple[list[str], int | None, str]]) -> dict[str, dict[str, Any]]:
    outputs = run_ranks(JOB, 1, [json.dumps([list(task) for task in tasks.values()])])
    return dict(zip(tasks, results(outputs), strict=True))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """A model, the same one stopped and continued, one of whole completions; and what that is refused for."""
    root = tmp_path_factory.mktemp("process")
    write_completions(root / "steps.jsonl", range(22))
    write_completions(root / "test.jsonl", range(100, 110))
    write_pairs(root / "pairs.jsonl", range(16))
    whole = [word for word in model_of(root, "whole", "run.trains=reward_model") if not word.startswith("pairs.")]
    whole += [f"pairs.path={root}/pairs.jsonl", "pairs.batch_size=8", "pairs.warmup_steps=0", "pairs.lr=3e-3"]
    by_whole = [f"reward.model.path={root}/whole", "run.init_from=null"]
    one_number = [*by_whole, "algorithm.supervision=outcome", "reward.model.outcome=product"]
    learns = ("run.init", "reward", "algorithm.supervision")
    taught = [word for word in policy_of(root, "taught") if not word.startswith(learns)]
    taught += [f"distill.teacher={root}/one"]
    return root, ran(
        {
            "one": (model_of(root, "one"), None, str(root / "one.pt")),
            "stopped": (model_of(root, "again"), 3, ""),
            "again": (model_of(root, "again"), None, str(root / "again.pt")),
            "whole": (whole, None, ""),
            "no steps": (policy_of(root, "no_steps", *by_whole), None, ""),
            "taught": (taught, None, ""),
            "no outcome": (policy_of(root, "no_outcome", *one_number), None, ""),
        }
    )


@pytest.fixture(scope="module")
def policies(runs: tuple[Path, dict]) -> tuple[Path, dict[str, dict[str, Any]]]:
    """Policies that can work out sums, and learn from the model of steps."""
    root = runs[0]
    left_out = ("run.init", "reward", "algorithm.supervision")
    start = [word for word in policy_of(root, "start") if not word.startswith(left_out)]
    start += ["run.steps=0", "sft=cold_start", "sft.steps=40", "sft.batch_size=32"]
    doubled = ["reward.model.outcome=product", "reward.model.weight=2"]
    return root, ran(
        {
            "start": (start, None, ""),
            "learned": (policy_of(root, "learned"), None, ""),
            "product": (policy_of(root, "product", *doubled), None, ""),
            "outcome": (policy_of(root, "outcome", "algorithm.supervision=outcome"), None, ""),
        }
    )


def test_it_learns_which_steps_are_right(runs: tuple[Path, dict]) -> None:
    root, seen = runs
    assert seen["one"]["stages"] == ["process_reward_model"]
    steps = [line for line in read_metrics(root / "one" / "metrics.jsonl") if "process_reward_model/loss" in line]
    assert [line["step"] for line in steps] == [*range(1, STEPS + 1)]
    assert not unexplained(steps)
    assert steps[0]["process_reward_model/loss"] == pytest.approx(math.log(2), abs=1e-6), "a head of 0 knows nothing"
    assert steps[-1]["process_reward_model/loss"] < steps[0]["process_reward_model/loss"]
    assert [line["step"] for line in steps if "eval/accuracy" in line] == [2, 4]
    state = json.loads((root / "one" / "checkpoints" / f"step-{STEPS:06d}" / "state.json").read_text())
    assert state["stage"]["separators"] == [";", "</think>"], "with which it scores in reinforcement learning"


def test_the_summary_says_how_good_it_is_on_steps_that_were_held_out(runs: tuple[Path, dict]) -> None:
    summary = json.loads((runs[0] / "one" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", STEPS)
    for name in ("accuracy", "auc", "calibration_error", "right"):
        assert 0 <= summary[f"held_out_step_{name}_after"] <= 1
    assert summary["held_out_step_loss_after"] > 0


def test_a_run_that_continues_learns_the_same_bit_for_bit(runs: tuple[Path, dict]) -> None:
    root, seen = runs
    assert seen["again"]["resumed"] == 3
    assert seen["again"]["lost"] == []
    one, other = torch.load(root / "one.pt"), torch.load(root / "again.pt")
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.long
def test_a_policy_learns_from_scores_of_steps(policies: tuple[Path, dict]) -> None:
    root, seen = policies
    assert "error" not in seen["learned"]
    for line in of_steps(root / "learned"):
        assert 0 < line["reward/model"] < 1
        assert line["reward/mean"] == pytest.approx(line["reward/model"], abs=1e-6)
        assert line["rollout/steps_mean"] > 1.5, "worked sums have several steps, a completion scored whole has one"
        assert line["policy/grad_norm"] > 0


@pytest.mark.long
def test_the_outcome_is_as_it_is_asked_and_weighed(policies: tuple[Path, dict]) -> None:
    root, _ = policies
    least, product = (of_steps(root / name)[0] for name in ("learned", "product"))
    assert 0 < product["reward/model"] < least["reward/model"], "of the same samples, and probabilities are below 1"
    assert product["reward/mean"] == pytest.approx(2 * product["reward/model"], abs=1e-6)


@pytest.mark.long
def test_outcome_supervision_takes_the_outcome_of_the_steps(policies: tuple[Path, dict]) -> None:
    root, _ = policies
    whole, by_step = (of_steps(root / name)[0] for name in ("outcome", "learned"))
    assert whole["reward/model"] == pytest.approx(by_step["reward/model"], abs=1e-6)


def test_a_model_of_whole_completions_is_refused_where_steps_are_asked_for(runs: tuple[Path, dict]) -> None:
    for name, setting in (
        ("no steps", "algorithm.supervision=process"),
        ("no outcome", "reward.model.outcome=product"),
    ):
        error = runs[1][name]["error"]
        assert f"{setting}: needs scores of steps, and reward.model.path=" in error
        assert "choose a run with run.trains=process_reward_model" in error


def test_a_teacher_that_is_a_reward_model_is_called_one(runs: tuple[Path, dict]) -> None:
    assert "one: a reward model, which has a scalar head and writes no text" in runs[1]["taught"]["error"]


@pytest.mark.parametrize("tool", [["evaluate.py", "--out"], ["export.py"]])
def test_tools_for_policies_say_that_it_is_a_reward_model(
    runs: tuple[Path, dict], tmp_path: Path, tool: list[str]
) -> None:
    for of_run in ("one", f"whole/checkpoints/{next((runs[0] / 'whole' / 'checkpoints').glob('step-*')).name}"):
        done = run_python(REPOSITORY / "tools" / tool[0], runs[0] / of_run, *tool[1:], tmp_path / "x")
        assert done.returncode == 2, done.stderr
        assert f"{runs[0] / of_run}: a reward model, which has a scalar head" in done.stderr
        assert "damaged" not in done.stderr
