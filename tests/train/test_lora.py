"""Runs with adapters (LoRA): they learn, continue under another layout after a kill, and leave their model whole."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import pytest
import torch
from exporting import assert_same, export, exported, weights
from train_jobs import SMALL, Job, numbers, rewarded_by

pytestmark = pytest.mark.long

ADAPTED = ["base=none", "lora.rank=8", "model.moe.bias_update_rate=0", "model.moe.frozen_bias=true"]
TINY_BASE = ["experiment=tiny", "run.steps=1", "run.eval_every=0", "data.test_size=8", "data.validation_size=8"]


@dataclass(frozen=True)
class Trained:
    """A toy's base model, and a run of two ranks that trained adapters of it for three steps."""

    root: Path
    base: Path
    run: Path
    overrides: list[str]


def base_model(root: Path, overrides: list[str]) -> Path:
    """The cached base model of a run that is made for it."""
    ended = Job(root, [*overrides, "run.name=whole"], ranks=2).finish()
    assert ended.code == 0, ended
    return next((root / "runs" / "base-models").iterdir())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Three of five steps: killed while the fourth is under way."""
    root = tmp_path_factory.mktemp("adapters")
    base = base_model(root, [*SMALL, "run.steps=1"])
    overrides = [*SMALL, *ADAPTED, rewarded_by("varied"), f"run.init_from={base}", "algorithm.kl_coef=0.1",
                 "run.save_every=1", "run.keep_checkpoints=9", "optimizer.lr=3e-3"]  # fmt: skip
    job = Job(root, [*overrides, "run.name=first", "run.steps=500"], ranks=2)
    job.wait_until_there(root / "runs" / "first" / "checkpoints" / "step-000003" / "manifest.json")
    job.kill()
    job.finish()
    for late in (root / "runs" / "first" / "checkpoints").glob("step-*"):
        if late.name > "step-000003":
            shutil.rmtree(late)
    return Trained(root, base, root / "runs" / "first", overrides)


def test_a_killed_run_continues_alike_under_other_layouts(trained: Trained) -> None:
    found = {}
    for name, layout, ranks in (("same", "ep2", 2), ("tp2", "tp2", 2), ("alone", "single", 0)):
        path = trained.run.with_name(name)
        shutil.copytree(trained.run, path)
        overrides = [*trained.overrides, f"layout={layout}", f"run.name={name}", "run.steps=5"]
        ended = Job(trained.root, overrides, ranks=ranks).finish()
        assert ended.code == 0, ended
        assert "continuing after step 3" in ended.stderr
        found[name] = numbers(path)
    assert [line["step"] for line in found["same"]] == [1, 2, 3, 4, 5]
    assert all(line["policy/grad_norm"] > 0 for line in found["same"])
    assert all(line["policy/kl"] > 0 for line in found["same"][3:])
    for other in ("tp2", "alone"):
        for mine, theirs in zip(found["same"], found[other], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5)


def test_the_reference_is_the_base_and_the_policy_is_not(trained: Trained, tmp_path: Path) -> None:
    """The base's weights are exported for comparison with its own; 247,016 parameters, of which none has moved."""
    source, config = trained.run / "checkpoints" / "step-000003", tmp_path / "config.yaml"
    config.write_text((trained.run / "config.yaml").read_text().replace("rank: 8", "rank: 0"))
    exported(trained.base, tmp_path / "base", "--config", config)
    exported(source, tmp_path / "reference", "--model", "reference")
    exported(source, tmp_path / "policy")
    assert_same(tmp_path / "reference", tmp_path / "base")
    policy, base = weights(tmp_path / "policy"), weights(tmp_path / "base")
    moved = {name for name in base if not torch.equal(policy[name], base[name])}
    assert moved == {name for name in base if name.endswith("_proj.weight")}


def test_weights_and_adapters_apart_are_not_taken_for_a_model(trained: Trained, tmp_path: Path) -> None:
    whole = [*SMALL, "layout=single", "run.steps=1", f"run.init_from={trained.run}/checkpoints/step-000003"]
    for own in (["base=none"], ADAPTED):
        ended = Job(tmp_path, [*whole, *own, "run.name=other"]).finish()
        assert ended.code != 0
        assert "it has weights and adapters apart (lora.rank above 0); write them as one model with" in ended.stderr


def test_another_rank_is_another_run(trained: Trained) -> None:
    other = [word for word in trained.overrides if word != "lora.rank=8"]
    ended = Job(trained.root, [*other, "layout=single", "run.name=first", "run.steps=9", "lora.rank=4"]).finish()
    assert ended.code != 0
    assert "lora.rank" in ended.stderr


def test_a_run_without_adapters_has_none_to_export(trained: Trained, tmp_path: Path) -> None:
    refused = export(trained.root / "runs" / "whole", tmp_path / "folder", "--adapter")
    assert refused.returncode == 2
    assert "the run trained all weights (lora.rank=0) and has no adapters" in refused.stderr


def test_the_toy_learns(tmp_path: Path) -> None:
    """From 3 % of the completions right: with adapters of rank 8 most are after twenty steps."""
    base = base_model(tmp_path, TINY_BASE)
    overrides = ["experiment=tiny", *ADAPTED, f"run.init_from={base}", "optimizer.lr=3e-3", "run.steps=20"]
    quick = ["run.eval_every=0", "data.test_size=8", "data.validation_size=8", "run.name=adapted"]
    ended = Job(tmp_path, [*overrides, *quick], ranks=2).finish()
    assert ended.code == 0, ended
    rewards = [line["reward/mean"] for line in numbers(tmp_path / "runs" / "adapted")]
    assert mean(rewards[:3]) < 0.3
    assert mean(rewards[-3:]) > 0.8
