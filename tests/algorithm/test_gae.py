"""Advantages from a critic's values: the papers' sums, written out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.algorithm.gae import explained_variance, generalized_advantages, whitened
from grpo_mega.types import pack_tokens

floats = st.floats(-5, 5, width=32)
completions = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.tuples(floats, floats), max_size=12)), min_size=1, max_size=4
)
"""(length of the prompt, (reward, value) of each token of the completion)"""


def packed(sequences: list[tuple[int, list[tuple[float, float]]]]) -> tuple[torch.Tensor, ...]:
    """Rewards, values, mask and cu_seqlens; prompts have rewards and values that must not count."""
    columns = torch.tensor([row for prompt, pairs in sequences for row in [(9.0, -7.0)] * prompt + pairs]).reshape(
        -1, 2
    )
    mask = [m for prompt, pairs in sequences for m in [False] * prompt + [True] * len(pairs)]
    lengths = torch.tensor([0, *(prompt + len(pairs) for prompt, pairs in sequences)])
    return columns[:, 0], columns[:, 1], torch.tensor(mask, dtype=torch.bool), lengths.cumsum(0)


@given(sequences=completions, gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_gae_is_the_sum_of_discounted_errors_of_the_completion(
    sequences: list[tuple[int, list[tuple[float, float]]]], gamma: float, lam: float
) -> None:
    advantages, returns = generalized_advantages(*packed(sequences), gamma, lam)
    expected, targets = [], []
    for prompt, pairs in sequences:
        rewards, values, n = [r for r, _ in pairs], [v for _, v in pairs], len(pairs)
        deltas = [rewards[t] + gamma * (values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)]
        sums = [sum((gamma * lam) ** (s - t) * deltas[s] for s in range(t, n)) for t in range(n)]
        expected += [0.0] * prompt + sums
        targets += [0.0] * prompt + [a + v for a, v in zip(sums, values, strict=True)]
    assert advantages.dtype is returns.dtype is torch.float32
    assert advantages.tolist() == pytest.approx(expected, abs=1e-4)
    assert returns.tolist() == pytest.approx(targets, abs=1e-4)


@given(
    tokens=st.lists(st.tuples(floats, floats, st.booleans()), max_size=16), gamma=st.floats(0, 1), lam=st.floats(0, 1)
)
def test_given_tokens_are_no_states(tokens: list[tuple[float, float, bool]], gamma: float, lam: float) -> None:
    """What follows the last token before a reply is the first one after it, as if the reply were not there."""
    sampled = [(reward, value) for reward, value, own in tokens if own]
    rewards, values, _, cu_seqlens = packed([(2, [(reward, value) for reward, value, _ in tokens])])
    mask = torch.tensor([False, False, *(own for *_, own in tokens)])
    of_all = generalized_advantages(rewards, values, mask, cu_seqlens, gamma, lam)
    alone = packed([(0, sampled)])
    for got, expected in zip(of_all, generalized_advantages(*alone, gamma, lam), strict=True):
        assert got[mask].tolist() == expected.tolist()
        assert not got[~mask].any()


@given(pairs=st.lists(st.tuples(floats, floats), min_size=1, max_size=12))
def test_gae_without_a_discount_is_the_rest_of_the_rewards_less_the_value(pairs: list[tuple[float, float]]) -> None:
    rewards, values, mask, cu_seqlens = packed([(2, pairs)])
    advantages, returns = generalized_advantages(rewards, values, mask, cu_seqlens, 1.0, 1.0)
    rest = rewards[2:].flip(0).cumsum(0).flip(0)
    torch.testing.assert_close(returns[2:], rest, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(advantages[2:], rest - values[2:], atol=1e-4, rtol=1e-4)


@given(values=st.lists(st.tuples(st.integers(-9, 9), st.booleans()), max_size=12))
def test_whitened_advantages_have_mean_0_and_deviation_1(values: list[tuple[int, bool]]) -> None:
    x, mask = torch.tensor([v / 3 for v, _ in values]), torch.tensor([m for _, m in values], dtype=torch.bool)
    got = whitened(x, mask)
    assert not got[~mask].any()
    if len({*x[mask].tolist()}) < 2:
        assert not got.any()
    else:
        assert float(got[mask].mean()) == pytest.approx(0, abs=1e-6)
        assert float(got[mask].std()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(("off", "explained"), [([0.0, 0.0, 0.0], 1.0), ([3.0, 3.0, 3.0], 1.0), ([1.0, 2.0, 4.0], 0.0)])
def test_explained_variance_is_what_a_critic_says_beyond_a_constant(off: list[float], explained: float) -> None:
    batch = pack_tokens([[1, 2, 3, 4]], [1])
    returns = torch.tensor([50.0, 1.0, 2.0, 4.0])
    batch = batch.with_(returns=returns, value=returns - torch.tensor([7.0, *off]))
    assert explained_variance(batch) == pytest.approx(explained)
    assert explained_variance(batch.with_(returns=torch.full((4,), 2.0))) == 0
