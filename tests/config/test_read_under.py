"""Under which layout a trained model is read again: as it was trained where that fits, or as the words say."""

from __future__ import annotations

import pytest
from composed import composed

from grpo_mega.config.read_only import read_under
from grpo_mega.config.schema import Config, LayoutConfig
from grpo_mega.errors import InputError

TP2_PP2 = ["experiment=tiny", "layout=tp2_pp2", "algorithm.prompts_per_step=8", "layout.micro_batch_tokens=333"]


@pytest.fixture(scope="module")
def trained() -> Config:
    """Of a run on four processes or a multiple."""
    return composed(*TP2_PP2)


@pytest.mark.parametrize("processes", [4, 8, 12])
def test_where_the_run_s_layout_fits_it_is_kept_whatever_training_asks_of_it(trained: Config, processes: int) -> None:
    """12 processes are three replicas, over which eight prompts cannot be shared out."""
    assert read_under(trained, [], processes).layout == trained.layout


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_otherwise_every_process_holds_the_whole_model(trained: Config, processes: int) -> None:
    assert read_under(trained, [], processes).layout == LayoutConfig()


def test_words_describe_all_of_it(trained: Config) -> None:
    found = read_under(trained, ["layout.ep=4"], 4)
    assert found.layout == LayoutConfig(ep=4)
    assert found.model == trained.model


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["layout.ep=3"], "layout.ep=3"),
        (["layout.tp=2", "layout.sp=true"], "the world size 3: not divisible by layout.tp=2"),
        (["layout.pq=2"], "layout.pq: not a setting"),
        (["run.steps=2"], "run.steps=2: fixed by the model's training; give only settings of layout.*"),
    ],
)
def test_what_is_no_layout_of_these_processes_is_named(trained: Config, words: list[str], message: str) -> None:
    with pytest.raises(InputError) as error:
        read_under(trained, words, 3)
    assert message in str(error.value)
