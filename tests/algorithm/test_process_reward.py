"""The loss of steps beside float64 autograd written out, what is said of a process reward model, and of the whole."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega import platform

platform.start()  # which imports Megatron without torch's compiler: in this process, tests of algorithm are the first

from grpo_mega.algorithm.process_reward import (  # noqa: E402
    outcome_of_steps,
    step_calibration_error,
    step_loss,
    step_metrics,
)
from grpo_mega.models.scalar import cross_entropy, right_side  # noqa: E402
from grpo_mega.types import ScoredTokens  # noqa: E402

steps = st.lists(st.tuples(st.floats(-20, 20), st.floats(0, 1)), min_size=1, max_size=20)


def columns(of_steps: list[tuple[float, float]]) -> tuple[torch.Tensor, torch.Tensor]:
    scores, labels = torch.tensor(of_steps, dtype=torch.float64).unbind(dim=1)
    return scores.clone(), labels.clone()


def scored(labels: torch.Tensor) -> ScoredTokens:
    """Tokens with these labels in the column that is learned."""
    zeros, none = torch.zeros(len(labels)), torch.zeros(len(labels), dtype=torch.int64)
    named = ("weight", "advantage", "rollout_logprob", "old_logprob", "ref_logprob")
    return ScoredTokens(index=none, tokens=none, mask=none.bool(), returns=labels, **dict.fromkeys(named, zeros))


@given(of_steps=steps)
def test_loss_and_gradient_are_those_of_the_cross_entropy_written_out(of_steps: list[tuple[float, float]]) -> None:
    scores, labels = columns(of_steps)
    scores.requires_grad_()
    right = torch.sigmoid(scores)
    written_out = -(labels * torch.log(right) + (1 - labels) * torch.log(1 - right)).mean()
    loss = step_loss(scores, labels)
    assert loss.item() == pytest.approx(written_out.item(), rel=1e-6, abs=1e-9)
    (gradient,) = torch.autograd.grad(loss, scores, retain_graph=True)
    torch.testing.assert_close(gradient, ((right - labels) / len(labels)).detach(), atol=1e-12, rtol=1e-9)
    weighted = (cross_entropy(scores, scored(labels)) / len(labels)).sum()
    (trained,) = torch.autograd.grad(weighted, scores)
    torch.testing.assert_close(trained, gradient, atol=1e-12, rtol=1e-9)


@given(of_steps=steps)
def test_metrics_are_what_their_words_say(of_steps: list[tuple[float, float]]) -> None:
    scores, labels = columns(of_steps)
    metrics = step_metrics(scores, labels)
    kinds = [(s, y >= 0.5) for s, y in zip(scores.tolist(), labels.tolist(), strict=True)]
    assert metrics["accuracy"] == pytest.approx(sum((s >= 0) == y for s, y in kinds) / len(kinds))
    assert metrics["right"] == pytest.approx(sum(y for _, y in kinds) / len(kinds))
    assert right_side(scores, scored(labels)).mean().item() == pytest.approx(metrics["accuracy"])
    rights, wrongs = [s for s, y in kinds if y], [s for s, y in kinds if not y]
    if rights and wrongs:
        wins = sum((r > w) + (r == w) / 2 for r in rights for w in wrongs)
        assert metrics["auc"] == pytest.approx(wins / (len(rights) * len(wrongs)))
    else:
        assert "auc" not in metrics


def test_probabilities_that_are_the_shares_of_right_steps_are_calibrated() -> None:
    scores = torch.tensor([math.log(3)] * 4 + [0.0] * 2, dtype=torch.float64)
    labels = torch.tensor([1, 1, 1, 0, 1, 0], dtype=torch.float64)
    assert step_calibration_error(scores, labels) == pytest.approx(0, abs=1e-12)
    assert step_calibration_error(torch.full((4,), 50.0).double(), torch.zeros(4).double()) == pytest.approx(1)


def test_scores_far_out_have_a_finite_loss() -> None:
    assert step_loss(torch.tensor([-2000.0, 2000.0]), torch.tensor([1.0, 1.0])).item() == pytest.approx(1000)


def test_the_outcome_is_the_least_the_product_or_the_last() -> None:
    assert {how: outcome_of_steps([0.5, 0.25, 0.75], how) for how in ("min", "product", "last")} == {
        "min": 0.25, "product": 0.09375, "last": 0.75,
    }  # fmt: skip
