"""tools/evaluate.py with generation in real SGLang."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from evaluating import evaluate, results, samples
from on_cuda import TINY
from train_jobs import Job

RUN = [
    "experiment=tiny_sglang",
    "base=none",
    "layout=single",
    "rollout.engine=embedded",
    "data.validation_size=8",
    "data.test_size=8",
    "algorithm.prompts_per_step=8",
    "algorithm.group_size=4",
    "rollout.max_new_tokens=12",
    "run.name=toy",
    "run.steps=1",
    "run.eval_every=0",
    "run.tensorboard=false",
]
HERE = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that never saw SGLang."""
    root = tmp_path_factory.mktemp("toy")
    ended = Job(root, [*RUN, *TINY]).finish()
    assert ended.code == 0, ended
    return root / "runs" / "toy"


def test_the_likeliest_completions_are_those_of_the_embedded_engine(toy: Path, tmp_path: Path) -> None:
    greedy = ("--samples", 1, "--temperature", 0, "--budgets", 4)
    own = evaluate(toy, *greedy, "--out", tmp_path / "own", environment=HERE)
    shown = evaluate(toy, "rollout.engine=sglang", *greedy, "--out", tmp_path / "sglang", environment=HERE)
    assert ", by SGLang" in shown
    assert ", by SGLang" not in own
    ours, theirs = samples(tmp_path / "own"), samples(tmp_path / "sglang")
    assert len(theirs) == 8
    assert [record["completion"] for record in theirs] == [record["completion"] for record in ours]
    assert results(tmp_path / "sglang")["all"] == results(tmp_path / "own")["all"]


def test_several_samples_are_drawn_and_engines_are_not_mixed_in_one_folder(toy: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    evaluate(toy, "rollout.engine=sglang", "--samples", 4, "--out", out, environment=HERE)
    drawn = samples(out)
    assert len(drawn) == 8 * 4
    assert len({record["completion"] for record in drawn}) > 20
    assert json.loads((out / "settings.json").read_text())["engine"] == "sglang"
    said = evaluate(toy, "--samples", 4, "--out", out, environment=HERE, code=2)
    assert 'engine: "sglang" there, absent now' in said
