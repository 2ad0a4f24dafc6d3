"""What a reward model's files say of it, and layouts that cannot split it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from composed import composed
from made_run import write_run

from grpo_mega.config.schema import Config, ModelConfig
from grpo_mega.config.trained_model import check_reward_model, read_reward_model
from grpo_mega.errors import ConfigError


def trained() -> Config:
    words = "experiment=tiny_reward_model", "pairs.path=pairs.jsonl", "layout=single", "model.layers=4"
    return composed(*words)


def policy(path: Path | None, *words: str) -> Config:
    return composed("experiment=tiny_dense", f"reward.model.path={path or 'null'}", *words)


def described(config: Config) -> ModelConfig | None:
    return read_reward_model(config.reward, config.model)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run that has a checkpoint."""
    return write_run(tmp_path / "liked", trained())


def test_a_run_and_its_checkpoint_have_the_architecture_of_the_run(run: Path) -> None:
    for path in (run, run / "checkpoints" / "step-000003"):
        assert described(policy(path, "model.context=100")) == replace(trained().model, context=100)


def test_of_one_that_does_not_say_or_is_yet_to_come_it_is_the_policy_s(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "checkpoints" / "step-000003", tmp_path / "copied")
    assert [described(policy(path)) for path in (tmp_path / "copied", tmp_path / "later", None)] == [None] * 3


def test_a_configuration_that_cannot_be_read_is_named(run: Path) -> None:
    (run / "config.yaml").write_text("a: [")
    with pytest.raises(ValueError, match=r"reward.model.path=.*config.yaml cannot be read"):
        described(policy(run))


def test_a_layout_that_cannot_split_it_is_refused() -> None:
    config = replace(policy(Path("liked")), layout=replace(trained().layout, ep=3))
    with pytest.raises(ConfigError, match=r"cannot hold the model: model.moe.experts=4: not divisible by layout.ep=3"):
        check_reward_model(config, trained().model)
    check_reward_model(config, policy(None).model)  # dense: whole on every rank
    exchanged = replace(config.layout, ep=2, dispatch="deepep")
    check_reward_model(replace(config, layout=exchanged), policy(None).model)  # which exchanges no tokens
