"""The average of the policy's weights is the formula's, and the policy comes back bit for bit from under it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from grpo_mega.algorithm.objective import negative_log_likelihood
from grpo_mega.config.schema import LoRAConfig, OptimizerConfig
from grpo_mega.models.adapters import is_adapter
from grpo_mega.models.average import AveragedPolicy
from grpo_mega.models.policy import Policy
from grpo_mega.types import Batch

DECAY = 0.75
MODELS = [("dense", "fp32", 0), ("moe", "bf16", 0), ("tied", "fp32", 0), ("moe", "fp32", 4)]


@pytest.fixture(params=MODELS, ids=lambda param: "-".join(map(str, param)))
def policy(request: pytest.FixtureRequest, make_policy: Callable[..., Policy]) -> Policy:
    model, dtype, rank = request.param
    made = make_policy(model, dtype=dtype, micro_batch_tokens=40, lora=LoRAConfig(rank=rank))
    made.use_optimizer(OptimizerConfig(lr=0.05))
    return made


def state(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in policy.chunks.named_parameters()}


def saved(average: AveragedPolicy) -> dict[str, torch.Tensor]:
    """What a checkpoint holds of the average."""
    with average.saved():
        return state(average.policy)


def learn(policy: Policy, batch: Batch) -> None:
    policy.update(batch, negative_log_likelihood, lr=0.05)


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_it_is_the_exponential_moving_average_in_float32(policy: Policy, batch: Batch) -> None:
    average = AveragedPolicy(policy, DECAY)
    expected = {name: p.double() for name, p in state(policy).items()}
    for _ in range(4):
        learn(policy, batch)
        average.follow()
        expected = {name: DECAY * expected[name] + (1 - DECAY) * p.double() for name, p in state(policy).items()}
    for name, weight in saved(average).items():
        if policy.lora is None or is_adapter(name):
            assert weight.dtype == torch.float32, name
            torch.testing.assert_close(weight.double(), expected[name], rtol=1e-5, atol=1e-7)


def test_the_policy_comes_back_bit_for_bit(policy: Policy, batch: Batch) -> None:
    average = AveragedPolicy(policy, DECAY)
    learn(policy, batch)
    average.follow()
    own, held = state(policy), saved(average)
    assert_equal(state(policy), own)
    with average.swapped_in():
        assert_equal(state(policy), {name: weight.to(own[name].dtype) for name, weight in held.items()})
        assert any(not torch.equal(p, own[name]) for name, p in policy.chunks.named_parameters())
    assert_equal(state(policy), own)
    with pytest.raises(KeyboardInterrupt), average.swapped_in():
        raise KeyboardInterrupt
    assert_equal(state(policy), own)
    assert_equal(saved(average), held)


def test_evaluating_with_it_does_not_change_training(make_policy: Callable[..., Policy], batch: Batch) -> None:
    policy, twin = (make_policy("moe", dtype="bf16", micro_batch_tokens=40) for _ in range(2))
    for one in (policy, twin):
        one.use_optimizer(OptimizerConfig(lr=0.05))
    average = AveragedPolicy(policy, DECAY)
    for _ in range(2):
        learn(policy, batch)
        average.follow()
        with average.swapped_in():
            policy.logprobs(batch, 1.0)
        learn(twin, batch)
        assert_equal(state(policy), state(twin))


def test_it_begins_again_where_the_policy_is(policy: Policy, batch: Batch) -> None:
    average = AveragedPolicy(policy, DECAY)
    learn(policy, batch)
    average.refresh()
    with average.swapped_in():
        now = policy.logprobs(batch, 0.9)
    assert torch.equal(now, policy.logprobs(batch, 0.9))
