"""GroupStepAdamW is torch's AdamW bit for bit, also behind Megatron."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mega.config.schema import OptimizerConfig
from grpo_mega.models.megatron.adam import GroupStepAdamW
from grpo_mega.models.optimizer import set_learning_rate
from grpo_mega.models.policy import Policy

options = st.fixed_dictionaries({
    "lr": st.floats(1e-5, 1e-1),
    "betas": st.tuples(st.floats(0, 0.99), st.floats(0, 0.999)),
    "eps": st.floats(1e-10, 1e-3),
    "weight_decay": st.sampled_from([0.0, 0.01, 0.3]),
})  # fmt: skip


def two_groups() -> list[dict]:
    random = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(n, 3, generator=random)) for n in (4, 1, 7)]
    return [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 1e-4}]


def take_step(optimizer: torch.optim.Optimizer, step: int) -> None:
    random = torch.Generator().manual_seed(step)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn(p.shape, generator=random)
    optimizer.step()


def weights(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p.detach() for group in optimizer.param_groups for p in group["params"]]


def assert_equal_bits(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@settings(deadline=None, max_examples=30)
@given(options, st.integers(1, 6), st.integers(0, 3))
def test_steps_equal_torch_adamw_bit_for_bit_also_after_loading(chosen: dict, before: int, after: int) -> None:
    ours, theirs = GroupStepAdamW(two_groups(), **chosen), torch.optim.AdamW(two_groups(), **chosen)
    for step in range(before):
        take_step(ours, step)
        take_step(theirs, step)
        assert_equal_bits(weights(ours), weights(theirs))

    loaded = GroupStepAdamW(two_groups(), **chosen)
    with torch.no_grad():
        for ours_now, copied in zip(weights(ours), weights(loaded), strict=True):
            copied.copy_(ours_now)
    loaded.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert [group["step"] for group in loaded.param_groups] == [before, before]
    for step in range(before, before + after):
        take_step(loaded, step)
        take_step(theirs, step)
        assert_equal_bits(weights(loaded), weights(theirs))


def test_the_step_is_kept_in_the_group_and_nowhere_else() -> None:
    optimizer = GroupStepAdamW(two_groups(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    take_step(optimizer, 0)
    assert [group["step"] for group in optimizer.param_groups] == [1, 1]
    assert all(set(state) == {"exp_avg", "exp_avg_sq"} for state in optimizer.state.values())


def test_every_group_of_a_megatron_optimizer_gets_the_learning_rate(make_policy: Callable[..., Policy]) -> None:
    policy = make_policy("moe")
    policy.use_optimizer(OptimizerConfig(lr=0.5))
    set_learning_rate(policy.optimizer, 0.125)
    assert {group["lr"] for group in policy.optimizer.param_groups} == {0.125}


@pytest.mark.parametrize("model", ["moe", "tied"])
def test_weight_decay_spares_norms_and_nothing_else(make_policy: Callable[..., Policy], model: str) -> None:
    policy = make_policy(model)
    policy.use_optimizer(OptimizerConfig(lr=0.1, weight_decay=0.5))
    before = {name: p.detach().clone() for name, p in policy.chunks.named_parameters()}
    policy.ddp_chunks[0].zero_grad_buffer()  # without gradients Adam moves nothing: what moves has decayed
    set_learning_rate(policy.optimizer, 0.1)
    policy.optimizer.step()
    for name, p in policy.chunks.named_parameters():
        expected = before[name] if p.dim() == 1 else before[name] * (1 - 0.1 * 0.5)
        torch.testing.assert_close(p.detach(), expected, msg=name)
