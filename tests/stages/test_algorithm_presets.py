"""Every preset of an algorithm composes, is in the documents' table, and has the numbers of its paper."""

from __future__ import annotations

import math
import re

import pytest

from grpo_mega.config.load import compose_config, config_dir
from grpo_mega.stages.step import advantage_options, loss_of

PRESETS = sorted(file.stem for file in (config_dir() / "algorithm").glob("*.yaml"))
DOCUMENT = config_dir().parent / "docs" / "algorithms.md"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_makes_a_loss_and_advantages(name: str) -> None:
    config = compose_config(["experiment=tiny", f"algorithm={name}"])
    loss_of(config.algorithm, old_is_current=True)
    advantage_options(config.algorithm, config.reward)


def test_ppo_has_a_critic_and_pays_for_divergence_at_every_token() -> None:
    algorithm = compose_config(["experiment=tiny", "algorithm=ppo"]).algorithm
    assert (algorithm.advantage_baseline, algorithm.advantage_std) == ("critic", "batch")
    assert (algorithm.kl_in, algorithm.kl_coef, algorithm.clip_low) == ("reward", 0.02, 0.2)


def test_the_table_has_exactly_the_presets() -> None:
    table = DOCUMENT.read_text().split("## Presets")[1].split("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == PRESETS


def test_grpo_is_that_of_the_paper_and_the_default_is_not() -> None:
    paper, default = (compose_config(["experiment=tiny", *more]).algorithm for more in (["algorithm=grpo"], []))
    assert (paper.aggregation, paper.kl_coef, paper.kl_estimator) == ("sequence_mean", 0.04, "k3")
    assert (paper.epochs, paper.mini_batches) == (1, 1)
    assert (default.aggregation, default.kl_coef) == ("token_mean", 0.0)


def test_the_bounds_of_gmpo_are_in_logarithms() -> None:
    algorithm = compose_config(["experiment=tiny", "algorithm=gmpo"]).algorithm
    assert math.log1p(-algorithm.clip_low) == pytest.approx(-0.4, abs=1e-4)
    assert math.log1p(algorithm.clip_high) == pytest.approx(0.4, abs=1e-4)
