"""The base model: when its gate is passed, and which runs share it."""

from __future__ import annotations

import pytest

from grpo_mega.config.load import compose_config
from grpo_mega.config.schema import BaseConfig
from grpo_mega.platform import start

start()  # before megatron.core is imported

from grpo_mega.stages.pretrain import base_path, gate_is_passed  # noqa: E402


@pytest.mark.parametrize(
    ("passes", "accuracies", "passed"),
    [
        (1, [0.2, 0.9], True),
        (1, [0.95, 0.89], False),
        (2, [0.95], False),
        (2, [0.9, 0.9], True),
        (2, [0.95, 0.86, 0.95], False),
        (2, [0.2, 0.95, 0.86, 0.92, 0.915], True),
        (3, [0.95, 0.86, 0.92, 0.915], False),
        (3, [0.86, 0.92, 0.915, 0.9], True),
    ],
)
def test_the_last_checks_all_reach_it(passes: int, accuracies: list[float], passed: bool) -> None:
    assert gate_is_passed(accuracies, BaseConfig(gate_accuracy=0.9, gate_passes=passes)) is passed


@pytest.mark.parametrize(
    ("words", "shared"),
    [
        (["data.train_size=64", "data.curriculum=frontier", "data.frontier_high=0.8"], True),
        (["data.frontier_terms=[accuracy]", "run.steps=3", "algorithm.group_size=4", "base.max_steps=900"], True),
        (["run.seed=1"], False),
        (["data.max_terms=6"], False),
        (["data.test_size=300"], False),  # the held-out problems are not in its documents
        (["base.tagged=0.2"], False),
        (["model.hidden=64"], False),
    ],
)
def test_runs_share_it_unless_they_train_it_differently(words: list[str], shared: bool) -> None:
    with_, without = (base_path(compose_config(["experiment=tiny_mixture", *more])) for more in (words, []))
    assert (with_ == without) is shared
