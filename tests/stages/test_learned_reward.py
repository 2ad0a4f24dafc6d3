"""A reward model in the loop: its score enters the reward, and a policy that games it raises the alarm."""

from __future__ import annotations

import json
import logging
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from forks import run_python
from metric_lines import held_out, of_steps
from ranks import REPOSITORY, results, run_ranks

from grpo_mega.stages.learned_reward import HackingAlarm

JOB = Path(__file__).with_name("reward_model_job.py")
STEPS = 12


def write_pairs_that_like_length(path: Path) -> None:
    """The longer of two completions without sense is preferred."""
    chance = random.Random(1)

    def completion(length: int) -> str:
        return "".join(chance.choice("0123456789+-*=:;") for _ in range(length))

    rows = [
        {"prompt": f"{i}=?", "chosen": completion(chance.randint(10, 15)), "rejected": completion(chance.randint(1, 9))}
        for i in range(160)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def policy_of(root: Path, layout: str, *more: str) -> list[str]:
    return [
        *("experiment=tiny", "base=none", f"layout={layout}", f"run.root={root}", f"run.steps={STEPS}"),
        *("run.eval_every=1", "run.tensorboard=false", "data.validation_size=100", "data.test_size=20"),
        *("algorithm.prompts_per_step=16", "algorithm.group_size=8", "rollout.max_new_tokens=16"),
        *("optimizer.lr=5e-4", "optimizer.warmup_steps=0", "run.export_every=0", "run.print_every=1"),
        *("reward.terms=[{name:short,weight:0,function:short_rewards:short}]", "reward.success=short"),
        f"reward.model.path={root}/likes_length",
        *more,
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]], str]:
    """A reward model that likes length; a policy that learns from it alone, once in peace and once continued; and runs
    that are refused."""
    root = tmp_path_factory.mktemp("learned")
    write_pairs_that_like_length(root / "pairs.jsonl")
    model = [
        *("run.trains=reward_model", "model=tiny_moe", "data.tokenizer=chars", f"run.root={root}"),
        *(f"pairs.path={root}/pairs.jsonl", "pairs.test_size=32", "pairs.epochs=6", "pairs.batch_size=32"),
        *("pairs.lr=3e-3", "run.name=likes_length", "run.tensorboard=false", "run.eval_every=0"),
    ]
    few = ["run.steps=2", "run.eval_every=0"]
    late = ["reward.model.from_step=1", "reward.terms.0.weight=1", *few]
    slices = ["rollout.slice_tokens=5", "rollout.in_flight=24", "algorithm.correction=truncate", "run.steps=3"]
    tasks: list[Any] = [
        [model, None, ""],
        [policy_of(root, "single", "run.name=hacker"), None, ""],
        [policy_of(root, "single", "run.name=raw", "reward.model.normalize=false", *few), None, ""],
        [policy_of(root, "single", "run.name=later", *late), None, ""],
        [policy_of(root, "single", "run.name=alone", "reward.terms=[]", "reward.model.weight=0.5", *few), None, ""],
        [policy_of(root, "single", "run.name=none", f"reward.model.path={root}/hacker"), None, ""],
        [policy_of(root, "single", "run.name=other", "data=tiny_code"), None, ""],
    ]
    dense = [*model, "model=tiny_dense", "run.name=dense", "pairs.epochs=1", "pairs.warmup_steps=0"]
    tasks += [[dense, None, ""], [policy_of(root, "single", "run.name=sliced", *late, *slices), None, ""]]
    outputs = run_ranks(JOB, 1, [json.dumps(tasks)])
    by_dense = policy_of(root, "ep2", "run.name=by_dense", f"reward.model.path={root}/dense", *few)
    for two in (policy_of(root, "ep2", "run.name=two", *few), by_dense):  # only one rank can have several runs
        run_ranks(JOB, 2, [json.dumps([[two, None, ""]])])
    return root, results(outputs), outputs[0]


@pytest.mark.long
def test_the_policy_learns_from_the_reward_model_alone(runs: tuple[Path, list, str]) -> None:
    lines = of_steps(runs[0] / "hacker")
    assert len(lines) == STEPS
    for line in lines:
        assert line["reward/mean"] == pytest.approx(line["reward/model"], abs=1e-6)
        assert line["time/reward_model"] > 0
    assert lines[-1]["reward/model"] > lines[0]["reward/model"] + 0.3


@pytest.mark.long
def test_gaming_it_raises_the_alarm(runs: tuple[Path, list, str]) -> None:
    """The completions that the model likes are long, and the success is for short ones."""
    evaluations = [line for line in of_steps(runs[0] / "hacker") if "eval/accuracy" in line]
    assert evaluations[-1]["eval/accuracy"] <= evaluations[0]["eval/accuracy"] - 0.1
    assert evaluations[0]["eval/hacking"] == 0
    assert evaluations[-1]["eval/hacking"] == 1
    assert "the policy may be gaming the reward model: the learned reward has risen from" in runs[2]


@pytest.mark.long
def test_scores_are_normalised_by_what_the_reward_model_learned(runs: tuple[Path, list, str]) -> None:
    root, _, _ = runs
    scale = json.loads((root / "likes_length" / "summary.json").read_text())["scores"]
    raw, normal = (of_steps(root / name)[0]["reward/model"] for name in ("raw", "hacker"))
    assert normal == pytest.approx((raw - scale["mean"]) / scale["std"], rel=1e-4, abs=1e-4)


@pytest.mark.long
def test_the_weight_and_the_first_step_are_as_configured(runs: tuple[Path, list, str]) -> None:
    root, _, _ = runs
    for line in of_steps(root / "alone"):
        assert line["reward/mean"] == pytest.approx(0.5 * line["reward/model"], abs=1e-6)
    first, second = of_steps(root / "later")
    assert "reward/model" not in first
    assert first["reward/mean"] == pytest.approx(first["reward/short"])
    assert second["reward/mean"] == pytest.approx(second["reward/short"] + second["reward/model"], abs=1e-6)


@pytest.mark.long
def test_a_completion_that_outlives_steps_is_scored_once_when_a_step_takes_it(runs: tuple[Path, list, str]) -> None:
    first, *others = of_steps(runs[0] / "sliced")
    assert "reward/model" not in first
    assert first["rollout/in_flight"] > 0
    for line in others:
        assert line["rollout/staleness_max"] > 0
        assert line["reward/mean"] == pytest.approx(line["reward/short"] + line["reward/model"], abs=1e-6)


@pytest.mark.long
def test_an_evaluation_is_scored_by_the_reward_model_that_is_named(runs: tuple[Path, list, str]) -> None:
    """As in the run's own last evaluation; its choice of k is reported."""
    root, _, _ = runs
    paths = (REPOSITORY, REPOSITORY / "kernels", JOB.parent)
    words = (f"{root}/hacker", "--trust-run", "--samples", "4", "--out")
    plain = run_python("tools/evaluate.py", *words, f"{root}/plain", paths=paths)
    assert "rm@2" not in plain.stdout, plain.stdout + plain.stderr
    model = f"reward.model.path={root}/likes_length"
    done = run_python("tools/evaluate.py", *words, f"{root}/scored", model, paths=paths)
    assert done.returncode == 0, done.stdout + done.stderr
    samples = [json.loads(line) for line in (root / "scored" / "samples.jsonl").read_text().splitlines()]
    of_problems = [samples[i : i + 4] for i in range(0, len(samples), 4)]
    best = [max(four, key=lambda one: one["terms"]["model"])["terms"]["short"] for four in of_problems]
    found = json.loads((root / "scored" / "results.json").read_text())["all"]
    assert found["rm@4"]["mean"] == pytest.approx(sum(best) / len(best))
    firsts = [four[0]["terms"]["model"] for four in of_problems]
    last = [line for line in held_out(root / "hacker") if "eval/heldout/model" in line][-1]
    assert sum(firsts) / len(firsts) == pytest.approx(last["eval/heldout/model"], rel=1e-4)


@pytest.mark.long
def test_expert_parallel_ranks_score_the_same_samples(runs: tuple[Path, list, str]) -> None:
    root, _, _ = runs
    one, two = (of_steps(root / name)[0] for name in ("hacker", "two"))
    for name in ("reward/model", "reward/short", "rollout/length_mean"):
        assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5)


@pytest.mark.long
def test_a_dense_reward_model_may_score_a_policy_with_experts(runs: tuple[Path, list, str]) -> None:
    assert of_steps(runs[0] / "by_dense")[0]["reward/model"] != 0


@pytest.mark.long
def test_a_run_that_continues_with_another_reward_model_is_refused(runs: tuple[Path, list, str]) -> None:
    root = runs[0]
    shutil.copytree(root / "likes_length", root / "swapped_model")
    task = policy_of(root, "single", "run.name=swapped", f"reward.model.path={root}/swapped_model", "run.eval_every=0")
    (begun,) = results(run_ranks(JOB, 1, [json.dumps([[task, 1, ""]])]))
    assert "error" not in begun
    (manifest,) = (root / "swapped_model" / "checkpoints").glob("*/manifest.json")
    manifest.write_text(manifest.read_text() + "\n")  # whole, and not the same
    (refused,) = results(run_ranks(JOB, 1, [json.dumps([[task, 1, ""]])]))
    assert "but this run began with a reward model of" in refused["error"]


@pytest.mark.long
def test_a_dry_run_finds_nothing_wrong_with_a_reward_model_that_is_continued(runs: tuple[Path, list, str]) -> None:
    root = runs[0]
    (checkpoint,) = (root / "likes_length" / "checkpoints").glob("step-*")
    words = [
        *("run.trains=reward_model", "model=tiny_moe", "data.tokenizer=chars", f"run.root={root}", "run.name=further"),
        *(f"pairs.path={root}/pairs.jsonl", f"run.init_from={checkpoint}", "layout=single"),
        "pairs.warmup_steps=0",
    ]
    done = run_python("-m", "grpo_mega.train", *words, "--dry-run")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "ready"), done.stdout + done.stderr


@pytest.mark.long
def test_a_dry_run_looks_into_the_reward_model_that_is_learned_from(runs: tuple[Path, list, str]) -> None:
    root, paths = runs[0], (REPOSITORY, REPOSITORY / "kernels", JOB.parent)

    def said(*more: str) -> str:
        words = policy_of(root, "single", "run.name=tried", *more)
        return run_python("-m", "grpo_mega.train", *words, "--dry-run", paths=paths).stdout

    assert said().splitlines()[-1] == "ready"
    (checkpoint,) = (root / "likes_length" / "checkpoints").glob("step-*")
    shutil.copytree(root / "likes_length", root / "cut")
    next((root / "cut" / "checkpoints" / checkpoint.name).glob("*/*.distcp")).write_bytes(b"")
    for setting, problem in {
        f"reward.model.path={root}/hacker": "hacker: holds no finished reward model",
        "data=tiny_code": "trained with another tokenizer than data.tokenizer=chars",
        "layout.tp=3": "this run cannot hold the model",
        f"reward.model.path={root}/cut": f"{root}/cut/checkpoints/{checkpoint.name}: the checkpoint is damaged",
    }.items():
        assert problem in said(setting), setting


@pytest.mark.long
def test_what_is_no_reward_model_for_this_policy_is_refused(runs: tuple[Path, list, str]) -> None:
    none, other = runs[1][5], runs[1][6]
    assert "hacker: holds no finished reward model; choose the directory of a run with" in none["error"]
    assert "likes_length: trained with another tokenizer than data.tokenizer=chars" in other["error"]


def test_the_alarm_compares_with_the_best_evaluation_and_is_saved(caplog: pytest.LogCaptureFixture) -> None:
    alarm = HackingAlarm()
    with caplog.at_level(logging.WARNING):
        assert alarm.heard({"accuracy": 0.5, "model": 0.1}) == {"hacking": 0}
        assert alarm.heard({"accuracy": 0.7, "model": 0.4}) == {"hacking": 0}
        assert alarm.heard({"accuracy": 0.7, "model": 0.95}) == {"hacking": 0}, "as good as the best, which stays"
        assert alarm.heard({"accuracy": 0.45, "model": 0.3}) == {"hacking": 0}, "both fell"
        assert alarm.heard({"accuracy": 0.65, "model": 0.9}) == {"hacking": 0}, "within the noise"
        assert alarm.heard({"accuracy": 0.2}) == {}
        assert not caplog.records
        again = HackingAlarm()
        again.load_state_dict(json.loads(json.dumps(alarm.state_dict())))
        assert again.heard({"accuracy": 0.58, "model": 0.9}) == {"hacking": 1}
    (record,) = caplog.records
    for part in ("from 0.400 to 0.900", "from 70.0% to 58.0%", "Lower reward.model.weight", "algorithm.kl_coef"):
        assert part in record.getMessage()
