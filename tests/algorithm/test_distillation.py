"""The formulas of on-policy distillation, written out in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.algorithm.distillation import distillation_advantages, distillation_metrics

logprobs = st.floats(-30, 0, width=32)
coefs = st.floats(0.001, 10)
tokens = st.lists(st.tuples(logprobs, logprobs, st.floats(-5, 5, width=32), st.booleans()), max_size=20)
"""(student, teacher, advantage from rewards, whether it was sampled) of every token"""


def columns(rows: list[tuple[float, float, float, bool]]) -> tuple[torch.Tensor, ...]:
    student, teacher, rewarded, mask = zip(*rows, strict=True) if rows else ((), (), (), ())
    return *(torch.tensor(column) for column in (student, teacher, rewarded)), torch.tensor(mask, dtype=torch.bool)


@given(rows=tokens, coef=coefs, reward_coef=st.floats(0, 10))
def test_an_advantage_is_what_the_teacher_thinks_more_likely_and_what_rewards_add(
    rows: list[tuple[float, float, float, bool]], coef: float, reward_coef: float
) -> None:
    found = distillation_advantages(*columns(rows), coef, reward_coef)
    expected = [(coef * (p - q) + reward_coef * a) if sampled else 0.0 for q, p, a, sampled in rows]
    assert found.dtype is torch.float32
    assert found.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(rows=tokens)
def test_metrics_are_means_of_the_sampled_tokens(rows: list[tuple[float, float, float, bool]]) -> None:
    student, teacher, _, mask = columns(rows)
    found = distillation_metrics(student, teacher, mask)
    sampled = [(q, p) for q, p, _, is_sampled in rows if is_sampled]
    n = max(1, len(sampled))
    assert found["reverse_kl"] == pytest.approx(math.fsum(q - p for q, p in sampled) / n, abs=1e-12)
    assert found["teacher_logprob"] == pytest.approx(math.fsum(p for _, p in sampled) / n, abs=1e-12)


@given(of_student=st.lists(st.floats(0.01, 1), min_size=2, max_size=6), other=st.data())
def test_the_advantage_is_minus_the_reverse_kl_on_average_over_what_the_student_samples(
    of_student: list[float], other: st.DataObject
) -> None:
    """Of one token whose vocabulary is small enough to sum over."""
    size = len(of_student)
    q = torch.tensor(of_student, dtype=torch.float64)
    p = torch.tensor(other.draw(st.lists(st.floats(0.01, 1), min_size=size, max_size=size)), dtype=torch.float64)
    q, p = q / q.sum(), p / p.sum()
    mask = torch.ones(size, dtype=torch.bool)
    advantage = distillation_advantages(q.log(), p.log(), torch.zeros(size), mask, 1.0, 0.0)
    kl = torch.nn.functional.kl_div(p.log(), q, reduction="sum")
    assert float((q * advantage).sum()) == pytest.approx(-float(kl), abs=1e-6)
