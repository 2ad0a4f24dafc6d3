"""Which runs share a base model: those that differ in nothing that it is made of."""

import pytest

from grpo_mega.config.load import compose_config
from grpo_mega.platform import start

start()  # before megatron.core is imported

from grpo_mega.stages.pretrain import base_path  # noqa: E402


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
