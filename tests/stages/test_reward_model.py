"""A reward model's run: it learns what is preferred, continues bit for bit, and starts from what it is given."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from made_pairs import write_pairs
from metric_lines import repeated, unexplained
from ranks import results, run_ranks

JOB = Path(__file__).with_name("reward_model_job.py")
LAYOUTS = {"single": 1, "pp2": 2, "ep2": 2}
OTHERS = [pytest.param(layout, marks=pytest.mark.long) for layout in ("pp2", "ep2")]
STEPS = 6
"""Two passes over 22 pairs, eight at a time: the last step has four."""


def overrides_of(root: Path) -> list[str]:
    return [
        *("run.trains=reward_model", "model=tiny_moe", "data.tokenizer=chars", f"run.root={root}"),
        *(f"pairs.path={root}/pairs.jsonl", f"pairs.test_path={root}/test.jsonl"),
        *("pairs.epochs=2", "pairs.batch_size=8", "pairs.warmup_steps=2", "pairs.lr=3e-3", "pairs.save_every=0"),
        "pairs.weight_decay=0.05",
        *("run.eval_every=2", "run.tensorboard=false", "run.print_every=1"),
    ]


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, list[dict[str, Any]]]]:
    """Runs under the layouts that selected tests are about; on one rank also one that was continued, one whose file has
    changed by then, and some that begin with what the first one left."""
    root, seen = tmp_path_factory.mktemp("reward_model"), {}
    write_pairs(root / "pairs.jsonl", range(22))
    write_pairs(root / "test.jsonl", range(100, 110))
    shutil.copy(root / "pairs.jsonl", root / "changing.jsonl")
    common = overrides_of(root)
    here = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    asked_for = {spec.params.get("layout") for spec in here if spec}
    for layout in [layout for layout in LAYOUTS if layout == "single" or layout in asked_for]:
        named = [*common, f"layout={layout}"]
        tasks: list[Any] = [[[*named, f"run.name={layout}"], None, str(root / f"{layout}.pt")]]
        if layout == "single":
            again = [*named, "run.name=again"]
            tasks += [[again, steps, str(root / "again.pt")] for steps in (3, STEPS - 3, None)]
            last = f"run.init_from={root}/single/checkpoints/step-{STEPS:06d}"
            tasks += [[[*named, "run.name=further", last], 0, str(root / "further.pt")]]
            policy = ["experiment=tiny", "base=none", "model=tiny_moe", "layout=single", f"run.root={root}"]
            policy += ["run.name=policy", "run.seed=7", "data.validation_size=10", "data.test_size=10"]
            body = f"run.init_from={root}/policy/checkpoints/step-000000"
            tasks += [[policy, 0, str(root / "policy.pt")], [[*named, "run.name=body", body], 0, str(root / "body.pt")]]
            tasks += [[[*named, "run.name=changing", f"pairs.path={root}/changing.jsonl"], 2, ""]]
        seen[layout] = results(run_ranks(JOB, LAYOUTS[layout], [json.dumps(tasks)]))
    write_pairs(root / "changing.jsonl", range(1, 23))
    task = [[*common, "layout=single", "run.name=changing", f"pairs.path={root}/changing.jsonl"], 2, ""]
    seen["changed"] = results(run_ranks(JOB, 1, [json.dumps([task])]))
    return root, seen


def lines(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def whole(root: Path, name: str) -> dict[str, torch.Tensor]:
    return torch.load(root / f"{name}.pt")


def test_its_only_stage_learns_what_is_preferred(runs: tuple[Path, dict]) -> None:
    root, seen = runs
    first = seen["single"][0]
    assert (first["stages"], first["resumed"]) == (["reward_model"], 0)
    assert first["head"] > 0
    steps = lines(root / "single")
    assert not unexplained(steps)
    assert [line["step"] for line in steps] == [*range(1, STEPS + 1)]
    assert steps[0]["reward_model/loss"] == pytest.approx(math.log(2), abs=1e-6), "a head of 0 prefers nothing"
    assert (steps[0]["reward_model/accuracy"], steps[0]["reward_model/margin"]) == (0, 0)
    assert steps[-1]["reward_model/loss"] < 0.5 * steps[0]["reward_model/loss"]
    assert steps[-1]["reward_model/margin"] > 0.5
    assert all(line["reward_model/grad_norm"] > 0 for line in steps)
    assert [line["reward_model/lr"] for line in steps] == pytest.approx([1.5e-3, *[3e-3] * 5])
    assert first["weight_decay"] == [0, 0.05], "not that of norms and biases"
    assert [line["step"] for line in steps if "eval/accuracy" in line] == [2, 4]


def test_the_summary_says_how_good_it_is_on_pairs_that_were_held_out(runs: tuple[Path, dict]) -> None:
    summary = json.loads((runs[0] / "single" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", STEPS)
    assert 0.5 < summary["held_out_pair_accuracy_after"] <= 1
    assert 0 < summary["held_out_pair_loss_after"] < math.log(2)
    assert 0 <= summary["held_out_pair_calibration_error_after"] < 0.5
    state = json.loads((runs[0] / "single" / "checkpoints" / f"step-{STEPS:06d}" / "state.json").read_text())
    assert state["stage"]["scale"] == summary["scores"]
    assert summary["scores"]["std"] > 0.1
    assert summary["scores"] == pytest.approx(runs[1]["single"][0]["scale"], rel=1e-4), "of the learned pairs"


@pytest.mark.parametrize("layout", OTHERS)
def test_layouts_learn_the_same(runs: tuple[Path, dict], layout: str) -> None:
    root, _ = runs
    for mine, one in zip(lines(root / layout), lines(root / "single"), strict=True):
        kept = repeated(one)
        assert {name: mine[name] for name in kept} == pytest.approx(kept, rel=1e-3, abs=1e-4)
    one, other = whole(root, "single"), whole(root, layout)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert (other[name] - tensor).norm() <= 1e-4 * tensor.norm(), name


def test_a_run_that_continues_learns_the_same(runs: tuple[Path, dict]) -> None:
    root, seen = runs
    assert [start["resumed"] for start in seen["single"][1:4]] == [0, 3, STEPS]
    assert [start["lost"] for start in seen["single"][2:4]] == [[], []], "the second one has measured the scale"
    one, other = whole(root, "single"), whole(root, "again")
    assert all(torch.equal(one[name], other[name]) for name in one)
    kept = ("held_out_pair_accuracy_after", "held_out_pair_loss_after", "scores")
    summaries = [json.loads((root / name / "summary.json").read_text()) for name in ("single", "again")]
    assert [summaries[1][name] for name in kept] == [summaries[0][name] for name in kept]


def test_a_reward_model_is_continued_with_its_head(runs: tuple[Path, dict]) -> None:
    root, _ = runs
    one, other = whole(root, "single"), whole(root, "further")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_reward_model_begins_with_a_policy_s_body_and_a_head_of_0(runs: tuple[Path, dict]) -> None:
    root, _ = runs
    policy, body = whole(root, "policy"), whole(root, "body")
    assert not body.pop("scalar_head.weight").any()
    assert body.keys() < policy.keys()
    assert all(torch.equal(policy[name], tensor) for name, tensor in body.items())


def test_files_that_have_changed_are_noticed(runs: tuple[Path, dict]) -> None:
    assert "error" not in runs[1]["single"][-1]
    assert "the saved steps of this run were on the pairs" in runs[1]["changed"][0]["error"]
    assert "changing.jsonl sha256=" in runs[1]["changed"][0]["error"]
