"""The reference policy is what the policy was, and the policy comes back bit for bit from under it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import pytest
import torch

from grpo_mega.algorithm.objective import negative_log_likelihood
from grpo_mega.config.schema import OptimizerConfig
from grpo_mega.models.policy import Policy
from grpo_mega.models.reference import ReferencePolicy
from grpo_mega.types import Batch

MODELS = [("dense", "fp32"), ("moe", "fp32"), ("moe", "bf16"), ("latent", "fp32"), ("tied", "fp32")]


@pytest.fixture(params=MODELS, ids="-".join)
def make_one(request: pytest.FixtureRequest, make_policy: Callable[..., Policy]) -> Callable[[], Policy]:
    """Makes policies that are the same and start alike."""
    model, dtype = request.param

    def make() -> Policy:
        made = make_policy(model, dtype=dtype, micro_batch_tokens=40)
        made.use_optimizer(OptimizerConfig(lr=0.05))
        return made

    return make


@pytest.fixture
def policy(make_one: Callable[[], Policy]) -> Policy:
    return make_one()


def state(policy: Policy) -> dict[str, torch.Tensor]:
    """Copies of all weights and buffers, the balancing biases of experts among them."""
    named = chain(policy.chunks.named_parameters(), policy.chunks.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in named}


def assert_state(policy: Policy, expected: dict[str, torch.Tensor]) -> None:
    now = state(policy)
    assert now.keys() == expected.keys()
    assert [name for name in now if not torch.equal(now[name], expected[name])] == []


def learn(policy: Policy, batch: Batch) -> None:
    """Moves every weight."""
    before = state(policy)
    policy.update(batch, negative_log_likelihood, lr=0.05)
    assert not any(torch.equal(p, before[name]) for name, p in policy.chunks.named_parameters())


def test_a_fresh_reference_scores_as_the_policy(policy: Policy, batch: Batch) -> None:
    assert torch.equal(ReferencePolicy(policy).logprobs(batch, 0.9), policy.logprobs(batch, 0.9))


def test_after_an_update_it_still_scores_as_the_policy_did(policy: Policy, batch: Batch) -> None:
    reference = ReferencePolicy(policy)
    old = policy.logprobs(batch, 0.9)
    for _ in range(2):
        learn(policy, batch)
        new = policy.logprobs(batch, 0.9)
        assert torch.equal(reference.logprobs(batch, 0.9), old)
        assert torch.equal(policy.logprobs(batch, 0.9), new)
    assert not torch.equal(new[batch.mask], old[batch.mask])


def test_the_policy_comes_back_bit_for_bit(policy: Policy, batch: Batch) -> None:
    old = state(policy)
    reference = ReferencePolicy(policy)
    learn(policy, batch)
    new = state(policy)
    with reference.swapped_in():
        assert_state(policy, old)
    assert_state(policy, new)
    with pytest.raises(KeyboardInterrupt), reference.swapped_in():
        raise KeyboardInterrupt
    assert_state(policy, new)
    with reference.swapped_in():
        assert_state(policy, old)


def test_scoring_does_not_change_the_next_update(make_one: Callable[[], Policy], batch: Batch) -> None:
    policy, twin = make_one(), make_one()
    reference = ReferencePolicy(policy)
    for _ in range(2):
        learn(policy, batch)
        reference.logprobs(batch, 1.0)
        learn(twin, batch)
        assert_state(policy, state(twin))


def test_a_refreshed_reference_scores_as_the_policy_now(policy: Policy, batch: Batch) -> None:
    reference = ReferencePolicy(policy)
    learn(policy, batch)
    reference.refresh()
    now = policy.logprobs(batch, 0.9)
    assert torch.equal(reference.logprobs(batch, 0.9), now)
    learn(policy, batch)
    assert torch.equal(reference.logprobs(batch, 0.9), now)
