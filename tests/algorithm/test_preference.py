"""The loss of pairs beside float64 autograd, its slopes, and what is said about a reward model."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.algorithm.preference import (
    calibration_error,
    preference_loss,
    preference_metrics,
    preference_slopes,
)

score = st.floats(-50, 50)
pairs = st.lists(st.tuples(score, score), min_size=1, max_size=12)


def columns(of_pairs: list[tuple[float, float]]) -> tuple[torch.Tensor, torch.Tensor]:
    chosen, rejected = torch.tensor(of_pairs, dtype=torch.float64).unbind(dim=1)
    return chosen, rejected


@given(of_pairs=pairs)
def test_the_slopes_are_those_of_the_loss(of_pairs: list[tuple[float, float]]) -> None:
    chosen, rejected = (column.clone().requires_grad_() for column in columns(of_pairs))
    written_out = sum(-torch.log(torch.sigmoid(c - r)) for c, r in zip(chosen, rejected, strict=True)) / len(of_pairs)
    loss = preference_loss(chosen, rejected)
    assert loss.item() == pytest.approx(written_out.item(), rel=1e-9, abs=1e-12)
    expected = torch.autograd.grad(loss, (chosen, rejected))
    for own, theirs in zip(preference_slopes(chosen.detach(), rejected.detach()), expected, strict=True):
        torch.testing.assert_close(own, theirs, atol=1e-15, rtol=1e-9)


@given(of_pairs=pairs, weight=st.floats(-2, 2))
def test_the_sum_of_slope_times_score_has_the_gradient_of_the_loss(
    of_pairs: list[tuple[float, float]], weight: float
) -> None:
    """Of a parameter that all scores depend on, each in its own way."""
    a, b = columns(of_pairs)
    parameter = torch.tensor(weight, dtype=torch.float64, requires_grad=True)
    chosen, rejected = torch.sin(parameter + a), parameter * b
    (expected,) = torch.autograd.grad(preference_loss(chosen, rejected), parameter, retain_graph=True)
    slopes = preference_slopes(chosen.detach(), rejected.detach())
    (found,) = torch.autograd.grad((slopes[0] * chosen + slopes[1] * rejected).sum(), parameter)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9)


def test_a_pair_far_apart_has_a_finite_loss_and_slope() -> None:
    chosen, rejected = columns([(-2000.0, 2000.0), (2000.0, -2000.0)])
    assert preference_loss(chosen, rejected).item() == pytest.approx(2000)
    assert preference_slopes(chosen, rejected)[0].tolist() == [-0.5, 0.0]


def test_without_pairs_there_are_no_slopes() -> None:
    none = torch.zeros(0, dtype=torch.float64)
    assert [len(slopes) for slopes in preference_slopes(none, none)] == [0, 0]


@given(of_pairs=pairs)
def test_metrics_are_written_out(of_pairs: list[tuple[float, float]]) -> None:
    differences = [c - r for c, r in of_pairs]
    found = preference_metrics(*columns(of_pairs))
    assert found["accuracy"] == pytest.approx(sum(d > 0 for d in differences) / len(differences))
    assert found["margin"] == pytest.approx(sum(differences) / len(differences), abs=1e-12)
    losses = [max(0.0, -d) + math.log1p(math.exp(-abs(d))) for d in differences]
    assert found["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-9, abs=1e-12)


@given(of_pairs=pairs, bins=st.integers(1, 10))
def test_the_calibration_error_is_written_out(of_pairs: list[tuple[float, float]], bins: int) -> None:
    members: dict[int, list[tuple[float, float]]] = {}
    for c, r in of_pairs:
        confidence = 1 / (1 + math.exp(-abs(c - r)))
        edge = (confidence - 0.5) * 2 * bins
        if abs(edge - round(edge)) < 1e-9 and 0 < edge < bins:
            return  # on which side of an edge it falls is rounding
        members.setdefault(min(int(edge), bins - 1), []).append((confidence, float(c > r)))
    expected = 0.0
    for of_bin in members.values():
        sure, right = (sum(column) / len(of_bin) for column in zip(*of_bin, strict=True))
        expected += len(of_bin) / len(of_pairs) * abs(sure - right)
    assert calibration_error(*columns(of_pairs), bins=bins) == pytest.approx(expected, abs=1e-9)


def test_who_says_what_is_so_is_calibrated() -> None:
    """Three of four pairs right at a difference whose confidence is 3/4; the same at 1 is off by 1/4."""
    sure = math.log(3)
    chosen, rejected = columns([(sure, 0.0), (1 + sure, 1.0), (0.0, -sure), (0.0, sure)])
    assert calibration_error(chosen, rejected) == pytest.approx(0, abs=1e-12)
    assert calibration_error(100 * chosen, 100 * rejected) == pytest.approx(0.25)
