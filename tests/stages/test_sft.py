"""Cold start on a file of chats, then GRPO: the loss falls, layouts agree, a run continues as if left in peace."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from made_tokenizer import write_tokenizer
from metric_lines import of_steps
from ranks import results, run_ranks

JOB = Path(__file__).with_name("supervised_job.py")
LAYOUTS = {"single": 1, "pp2": 2, "ep2": 2}
OTHERS = [pytest.param(layout, marks=pytest.mark.long) for layout in ("pp2", "ep2")]
ROWS = 11
STEPS = 9
"""Three passes over 11 rows, four at a time: the last step has one row, fewer than EP2 has replicas."""


def write_files(folder: Path) -> list[str]:
    """A tokenizer, problems and chats of several turns; returns the overrides that name them."""
    write_tokenizer(folder / "tokenizer", with_bos=False)
    for name, first in (("train", 0), ("test", 15)):
        problems = [{"prompt": f"What is {i}+5?", "answer": i + 5} for i in range(first, first + 12)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    rows = []
    for i in range(ROWS):
        turns = [
            ("user", f"What is {i}+3?"),
            ("assistant", f"It is {i + 3}"),
            ("user", "So?"),
            ("assistant", "x" * i + "."),
        ]
        rows.append({"messages": [{"role": role, "content": content} for role, content in turns[: 2 + i % 3]]})
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *("experiment=tiny", "base=none", "data=chat", f"data.tokenizer={folder}/tokenizer", "data.validation_size=4"),
        *(f"data.train_path={folder}/train.jsonl", f"data.test_path={folder}/test.jsonl"),
        *("reward.terms=[{name:own,function:step_rewards:scored}]", "reward.success=own"),
        *("algorithm.prompts_per_step=4", "algorithm.group_size=4", "rollout.max_new_tokens=8", "run.steps=1"),
        *("sft.epochs=3", "sft.batch_size=4", "sft.warmup_steps=2", "sft.lr=3e-3"),
        *("optimizer.warmup_steps=0", "run.eval_every=0", "run.tensorboard=false"),
        *(f"sft.path={folder}/chats.jsonl", f"run.root={folder}"),
    ]


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, list[dict[str, Any]]]]:
    """Runs under the layouts that selected tests are about; on one rank also one that was continued, and one whose file
    has changed by then."""
    root = tmp_path_factory.mktemp("supervised")
    common, seen = write_files(root), {}
    here = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    asked_for = {spec.params.get("layout") for spec in here if spec}
    selected = [layout for layout in LAYOUTS if layout == "single" or layout in asked_for]
    # A file that changes under a run, at a path of its own, which is part of what must stay.
    shutil.copy(root / "chats.jsonl", root / "changing.jsonl")
    with pytest.MonkeyPatch.context() as environment:
        for name in ("GRPO_MEGA_TEST_EQUAL", "GRPO_MEGA_TEST_HALF"):
            environment.setenv(name, str(root / "never"))
        for layout, ranks in ((name, LAYOUTS[name]) for name in selected):
            named = [*common, f"layout={layout}"]
            tasks: list[Any] = [[[*named, f"run.name={layout}"], None, str(root / f"{layout}.pt"), ""]]
            if layout == "single":
                changing = [*named, "run.name=changing", f"sft.path={root}/changing.jsonl"]
                tasks += [[[*named, "run.name=again"], steps, str(root / "again.pt"), ""] for steps in (4, None)]
                tasks += [[changing, 2, "", ""], [changing, 2, "", str(root / "changing.jsonl")]]
            seen[layout] = results(run_ranks(JOB, ranks, [json.dumps(tasks)]))
    return root, seen


def metric(run: Path, name: str) -> list[float]:
    return [json.loads(line)[f"sft/{name}"] for line in (run / "sft.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("layout", ["single", *OTHERS])
def test_the_loss_falls_and_reinforcement_learning_follows(runs: tuple[Path, dict], layout: str) -> None:
    root, seen = runs
    first = seen[layout][0]
    assert first == {"stages": ["sft", "grpo"], "resumed": 0, "moved": True}
    outcome = metric(root / layout, "loss")
    assert len(outcome) == STEPS
    assert sum(outcome[-3:]) < 0.7 * sum(outcome[:3])
    assert metric(root / layout, "lr") == pytest.approx([1.5e-3, *[3e-3] * (STEPS - 1)]), "two steps of warm-up"
    assert len(of_steps(root / layout)) == 1


@pytest.mark.parametrize("layout", OTHERS)
def test_layouts_learn_the_same(runs: tuple[Path, dict], layout: str) -> None:
    root, _ = runs
    assert metric(root / layout, "loss") == pytest.approx(metric(root / "single", "loss"), rel=1e-5)
    one, other = (torch.load(root / f"{name}.pt") for name in ("single", layout))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert (other[name] - tensor).norm() <= 1e-5 * tensor.norm(), name


def test_a_run_that_continues_learns_the_same(runs: tuple[Path, dict]) -> None:
    root, seen = runs
    assert seen["single"][2]["resumed"] == 4
    assert seen["single"][2]["lost"] == []
    one, other = (torch.load(root / f"{name}.pt") for name in ("single", "again"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_file_that_has_changed_is_noticed(runs: tuple[Path, dict]) -> None:
    before, after = runs[1]["single"][3:]
    assert "error" not in before
    assert "the saved supervised steps of this run were on" in after["error"]
    assert "changing.jsonl sha256=" in after["error"]
