"""Advantages of steps: the paper's sums, written out."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.algorithm.advantage import group_advantages, process_advantages

steps_of_a_group = st.lists(
    st.lists(st.tuples(st.integers(0, 9), st.integers(-3, 3)), max_size=4), min_size=2, max_size=5
)


@given(steps=steps_of_a_group)
def test_a_token_s_advantage_is_the_sum_of_normalised_rewards_of_the_steps_that_end_at_or_after_it(
    steps: list[list[tuple[int, int]]],
) -> None:
    rewards = [float(reward) for sample in steps for _, reward in sample]
    got = process_advantages(steps, [10] * len(steps))
    if len({*rewards}) < 2:
        assert not any(of_sample.any() for of_sample in got)
        return
    mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
    for of_sample, sample in zip(got, steps, strict=True):
        expected = [sum((r - mean) / deviation for end, r in sample if end >= t) for t in range(10)]
        assert of_sample.tolist() == pytest.approx(expected, abs=1e-5)


@given(rewards=st.lists(st.integers(-3, 3), min_size=2, max_size=6), length=st.integers(1, 5))
def test_one_step_at_the_end_is_outcome_supervision(rewards: list[int], length: int) -> None:
    got = process_advantages([[(length - 1, float(r))] for r in rewards], [length] * len(rewards))
    expected = group_advantages(torch.tensor(rewards), "sample")
    torch.testing.assert_close(torch.stack(got), expected[:, None].expand(-1, length))


@pytest.mark.parametrize("end", [-1, 3])
def test_a_step_outside_its_completion_is_refused(end: int) -> None:
    with pytest.raises(ValueError, match=r"steps of sample 1 end at .*; its tokens are 0 to 2"):
        process_advantages([[(0, 1.0)], [(end, 0.0)]], [3, 3])
