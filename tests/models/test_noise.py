"""The gradient noise scale is that of gradients whose mean and variance are known."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mega.models.noise import noise_in_batches

BETA1, BETA2 = 0.9, 0.95


def sums_of_adam(gradients: torch.Tensor, beta1: float = BETA1, beta2: float = BETA2) -> tuple[float, float]:
    """sum(m^2) and sum(v) of torch's Adam after gradients [updates, parameters]."""
    parameter = torch.nn.Parameter(torch.zeros(gradients.shape[1], dtype=torch.float64))
    adam = torch.optim.AdamW([parameter], betas=(beta1, beta2))
    for gradient in gradients:
        parameter.grad = gradient.clone()
        adam.step()
    state = adam.state[parameter]
    return state["exp_avg"].square().sum().item(), state["exp_avg_sq"].sum().item()


@settings(deadline=None, max_examples=25)
@given(
    noise=st.floats(0.01, 20), updates=st.integers(2, 60), beta1=st.floats(0.5, 0.95), beta2=st.floats(0.5, 0.999),
    seed=st.integers(0, 2**20),
)  # fmt: skip
def test_the_estimate_is_that_of_the_gradients(noise: float, updates: int, beta1: float, beta2: float, seed: int):
    """With 200,000 parameters whose gradient is 1 + noise of variance `noise`, tr(S) / |G|^2 / B is `noise`."""
    generator = torch.Generator().manual_seed(seed)
    shape = (updates, 200_000)
    gradients = 1 + noise**0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
    estimate = noise_in_batches(*sums_of_adam(gradients, beta1, beta2), updates, beta1, beta2)
    assert estimate == pytest.approx(noise, rel=0.15)


def test_equal_gradients_have_no_noise():
    gradients = torch.randn(1, 50, dtype=torch.float64).expand(9, 50)
    assert noise_in_batches(*sums_of_adam(gradients), 9, BETA1, BETA2) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("updates", "beta1"), [(0, 0.9), (1, 0.9), (5, 0.0)])
def test_there_is_no_telling_without_an_average_of_several_gradients(updates: int, beta1: float):
    assert noise_in_batches(1.0, 1.0, updates, beta1, BETA2) is None


def test_there_is_no_telling_when_nothing_stands_out_of_the_noise():
    opposite = torch.tensor([[1.0], [-1.0]], dtype=torch.float64).repeat(10, 30)
    assert noise_in_batches(*sums_of_adam(opposite), 20, BETA1, BETA2) is None
