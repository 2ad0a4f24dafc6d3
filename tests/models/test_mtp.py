"""Multi-token prediction: drafts are those of every sequence alone, and learning to draft moves nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

from grpo_mega.algorithm.objective import token_wise
from grpo_mega.config.schema import OptimizerConfig
from grpo_mega.models.megatron.mtp import PackedPredictor
from grpo_mega.models.megatron.packed import PackedTokens
from grpo_mega.models.policy import Policy
from grpo_mega.models.shards import gather_whole
from grpo_mega.stages.exchange import pack_samples
from grpo_mega.types import Batch, Prompt, Sample, ScoredTokens

MakePolicy = Callable[..., Policy]
VOCABULARY = 21
PROMPTS = [(4, 5, 6, 7), (9,), (7, 8)]
GROUPS = [(0, 3), (1, 5), (0, 1), (2, 4), (0, 6), (1, 2)]
"""Prompt and length of the completion; groups are mixed, and one prompt is shorter than two depths look back."""


@pytest.fixture
def batch() -> Batch:
    random = torch.Generator().manual_seed(1)
    samples = []
    for prompt, n in GROUPS:
        tokens = tuple(torch.randint(VOCABULARY, (n,), generator=random).tolist())
        samples.append(Sample(Prompt("", PROMPTS[prompt], "", "", ""), 0, tokens, (-1.0,) * n, "stop", ((0, 0),), ""))
    packed = pack_samples(samples)
    return packed.with_(weight=packed.mask / 20, advantage=torch.rand(len(packed.tokens), generator=random))


@token_wise
def policy_loss(logprob: torch.Tensor, known: ScoredTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return logprob.exp() * known.advantage, {}


def gradients_by_name(policy: Policy) -> dict[str, torch.Tensor]:
    return gather_whole(policy.chunks, lambda p: getattr(p, "main_grad", None))


def draft_loss_of_megatrons_own(policy: Policy, batch: Batch, depths: int, temperature: float) -> float:
    """Every sequence in a row of its own, tokens shifted by Megatron; over scored tokens and depths."""
    predictors = [m for m in policy.chunks.modules() if isinstance(m, PackedPredictor)]
    assert len(predictors) == depths
    total = 0.0
    for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        tokens, mask = batch.tokens[start:end], batch.mask[start:end]
        packed = PackedTokens.of_sequences(torch.tensor([end - start]), 1)
        for module in predictors:
            module.__class__ = MultiTokenPredictionLayer
        hidden = policy.chunks.last(tokens[None], packed.positions[None], None, packed_seq_params=packed)
        for depth in range(1, depths + 1):
            logprob = (policy.head.full_logits(hidden[depth]) / temperature).log_softmax(-1)
            for place in range(1 + depth, end - start):
                total -= mask[place] * logprob[place - 1 - depth, tokens[place]].item()
    for module in predictors:
        module.__class__ = PackedPredictor
    return float(total) / depths / int(batch.mask.sum())


@pytest.mark.parametrize("depths", [1, 2])
@pytest.mark.parametrize("model", ["dense", "latent"])
def test_drafts_are_those_of_every_sequence_alone(
    model: str, depths: int, make_policy: MakePolicy, batch: Batch
) -> None:
    policy = make_policy(model, mtp_layers=depths)
    for temperature in (1.0, 0.6):
        expected = draft_loss_of_megatrons_own(policy, batch, depths, temperature)
        assert expected > 1
        found = policy.gradients(batch, policy_loss, temperature).metrics["mtp_loss"]
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("model", ["dense", "latent"])
def test_every_other_gradient_is_that_of_a_model_without(model: str, make_policy: MakePolicy, batch: Batch) -> None:
    plain, drafting = make_policy(model), make_policy(model, mtp_layers=2, mtp_loss_coef=100.0)
    # Nothing shared: with prediction modules the end of a prompt is not, and sums round differently.
    apart = batch.with_(prompt_lengths=torch.zeros_like(batch.prompt_lengths))
    plain.gradients(apart, policy_loss)
    drafting.gradients(apart, policy_loss)
    outcome, expected = gradients_by_name(drafting), gradients_by_name(plain)
    for name, gradient in expected.items():
        torch.testing.assert_close(outcome.pop(name), gradient, atol=0, rtol=0)
    assert outcome
    assert all(name.startswith("mtp.") and gradient.norm() > 0 for name, gradient in outcome.items())


def test_learning_to_draft_leaves_the_policy_bit_for_bit(make_policy: MakePolicy, batch: Batch) -> None:
    policy = make_policy("dense", mtp_layers=1)
    policy.use_optimizer(OptimizerConfig(lr=0.01))
    before = gather_whole(policy.chunks)
    silent = batch.with_(weight=torch.zeros_like(batch.weight))
    losses = [policy.update(silent, policy_loss, lr=0.01).metrics["mtp_loss"] for _ in range(10)]
    assert losses[-1] < 0.7 * losses[0]
    after = gather_whole(policy.chunks)
    moved = {name for name, whole in after.items() if not torch.equal(whole, before[name])}
    assert moved
    assert all(name.startswith("mtp.") for name in moved)


def test_the_policy_moves_bit_for_bit_as_without_although_gradients_are_clipped(
    make_policy: MakePolicy, batch: Batch
) -> None:
    apart = batch.with_(prompt_lengths=torch.zeros_like(batch.prompt_lengths))
    plain, drafting = make_policy("latent"), make_policy("latent", mtp_layers=1, mtp_loss_coef=100.0)
    for policy in (plain, drafting):
        policy.use_optimizer(OptimizerConfig(lr=0.01, eps=0.1, clip_grad=0.01))
    for _ in range(3):
        norms = [policy.update(apart, policy_loss, lr=0.01).metrics["grad_norm"] for policy in (plain, drafting)]
        assert norms[0] == norms[1] > 0.01
    moved = gather_whole(drafting.chunks)
    for name, whole in gather_whole(plain.chunks).items():
        assert torch.equal(moved[name], whole), name


def test_the_loss_is_scaled_by_its_coefficient(make_policy: MakePolicy, batch: Batch) -> None:
    once, twice = (make_policy("dense", mtp_layers=1, mtp_loss_coef=coefficient) for coefficient in (0.25, 0.5))
    for policy in (once, twice):
        policy.gradients(batch, policy_loss)
    halves, wholes = gradients_by_name(once), gradients_by_name(twice)
    for name in (name for name in wholes if name.startswith("mtp.")):
        torch.testing.assert_close(2 * halves[name], wholes[name], atol=0, rtol=1e-5)


def test_scoring_and_generating_do_not_draft(make_policy: MakePolicy, batch: Batch) -> None:
    plain, drafting = make_policy("latent"), make_policy("latent", mtp_layers=1)
    for module in drafting.chunks.modules():
        if isinstance(module, PackedPredictor):
            module.register_forward_pre_hook(lambda *_: pytest.fail("a prediction module ran"))
    torch.testing.assert_close(drafting.logprobs(batch, 1.0), plain.logprobs(batch, 1.0), atol=0, rtol=0)
