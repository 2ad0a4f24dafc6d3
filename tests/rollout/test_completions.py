"""Completions reach all ranks as they were, and those that cannot be are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ranks import results, run_ranks

from grpo_mega.config.schema import ModelConfig, MoEConfig
from grpo_mega.rollout.completions import routed
from grpo_mega.rollout.contract import EngineError

JOB = Path(__file__).with_name("completions_job.py")


def test_every_rank_gets_what_all_of_them_had() -> None:
    assert results(run_ranks(JOB, 3, [])) == [[], [], []]


def told(*rows: tuple[int, int]) -> np.ndarray:
    """What SGLang says of one token in each row: the experts of both layers."""
    return np.array([[row, row] for row in rows], dtype=np.int32).flatten()


MODEL = ModelConfig(layers=2, moe=MoEConfig(experts=4, top_k=2, first_dense=1))


def test_the_experts_of_layers_that_have_some() -> None:
    assert routed(told((0, 3), (2, 1)), 2, MODEL).tolist() == [[[0, 3]], [[2, 1]]]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (None, "nothing of the experts of 2 tokens"),
        (told((0, 3)), "4 numbers of the experts of 2 tokens; 8 are due"),
        (told((0, 3), (4, 1)), "experts 0 to 4, and the model has 4"),
        (told((0, 3), (0, 0)), "names an expert twice"),
    ],
)
def test_experts_that_cannot_be_are_refused(said: np.ndarray | None, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        routed(said, 2, MODEL)
