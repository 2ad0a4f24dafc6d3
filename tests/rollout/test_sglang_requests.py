"""Completions that cannot be trained on are refused."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from grpo_mega.config.schema import ModelConfig, MoEConfig
from grpo_mega.rollout.contract import EngineError
from grpo_mega.rollout.sglang.requests import check, routed


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_log_prob_that_is_not_finite_is_refused_with_its_token(bad: float) -> None:
    with pytest.raises(EngineError, match=rf"token 1 of a sample the log-prob {bad}: are its weights whole"):
        check(array("i", [4, 5, 6]), array("f", [-0.5, bad, bad]))


def test_every_token_has_a_log_prob() -> None:
    with pytest.raises(EngineError, match="2 tokens and 1 log-probs"):
        check(array("i", [4, 5]), array("f", [-0.5]))
    check(array("i", [4, 5]), array("f", [-0.5, 0.0]))
    check(array("i"), array("f"))


def returned(*rows: tuple[int, int]) -> np.ndarray:
    """What SGLang returns for one token in each row: the experts of both layers."""
    return np.array([[row, row] for row in rows], dtype=np.int32).flatten()


MODEL = ModelConfig(layers=2, moe=MoEConfig(experts=4, top_k=2, first_dense=1))


def test_the_experts_of_layers_that_have_some() -> None:
    assert routed(returned((0, 3), (2, 1)), 2, MODEL).tolist() == [[[0, 3]], [[2, 1]]]


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (None, "nothing for the experts of 2 tokens"),
        (returned((0, 3)), "4 numbers for the experts of 2 tokens; 8 are due"),
        (returned((0, 3), (4, 1)), "experts 0 to 4, but the model has 4"),
        (returned((0, 3), (0, 0)), "names an expert twice"),
    ],
)
def test_experts_that_cannot_be_are_refused(experts: np.ndarray | None, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        routed(experts, 2, MODEL)
