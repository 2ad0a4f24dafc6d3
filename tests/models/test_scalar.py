"""A model that gives one number for each token: which number, what it learns, and that it starts from a policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import DENSE, MODELS, PLATFORM, VOCABULARY
from largest_tensor import LargestTensor

from grpo_mega.checkpoint import checkpoint
from grpo_mega.config.schema import LayoutConfig, OptimizerConfig
from grpo_mega.models.megatron.packed import PackedTokens
from grpo_mega.models.microbatch import ScoredTokens
from grpo_mega.models.policy import Policy
from grpo_mega.models.scalar import ScalarModel, SquaredError
from grpo_mega.models.topology import Topology
from grpo_mega.types import Batch, pack_tokens

MakeModel = Callable[..., ScalarModel]


@pytest.fixture
def make_model(topology: Topology) -> MakeModel:
    def make(model: str = "dense", vocabulary: int = VOCABULARY, **changes) -> ScalarModel:
        layout = LayoutConfig(micro_batch_tokens=30)
        made = ScalarModel("critic", replace(MODELS[model], **changes), layout, vocabulary, topology, PLATFORM)
        made.initialize(seed=3)
        return made

    return make


def hidden_states(policy: Policy, batch: Batch) -> torch.Tensor:
    """[T, H] of every sequence alone, with the policy's body."""
    found = []
    for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        with torch.no_grad():
            found.append(
                policy.hidden_states(batch.tokens[start:end], PackedTokens.of_sequences(torch.tensor([end - start]), 1))
            )
    return torch.cat(found)


@pytest.mark.parametrize("model", MODELS)
def test_a_value_is_the_weight_times_the_token_s_own_hidden_state(
    model: str, make_model: MakeModel, make_policy: Callable[..., Policy], batch: Batch
) -> None:
    """Of the body of a policy with the same seed; tokens off the mask have one, and the first of every sequence."""
    scalar = make_model(model)
    hidden = hidden_states(make_policy(model), batch).double()
    expected = hidden @ scalar.chunks.last.scalar_head.weight[0].detach().double()
    values = scalar.values(batch)
    assert values.dtype is torch.float32
    torch.testing.assert_close(values.double(), expected, atol=1e-5, rtol=1e-5)
    assert expected.std() > 0.1


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_the_loss_is_the_weighted_sum_and_the_gradient_its_slope(
    model: str, make_model: MakeModel, batch: Batch
) -> None:
    scalar, targets = make_model(model), torch.linspace(-1, 1, len(batch.tokens))
    values = scalar.values(batch).double()
    expected = (batch.weight * batch.mask * (values - targets).square()).sum().item()
    found = scalar.gradients(batch, SquaredError(targets))
    assert found.metrics["loss"] == pytest.approx(expected, rel=1e-5)
    assert found.metrics["value"] == pytest.approx(values[batch.mask].mean().item(), rel=1e-4)
    torch.testing.assert_close(found.outputs, values.float() * batch.mask, atol=1e-6, rtol=1e-5)
    slopes = [(p, p.main_grad.clone()) for p in scalar.chunks.parameters()]
    squared = sum(slope.double().square().sum().item() for _, slope in slopes)
    step = 5e-4 / squared**0.5

    def loss_after(size: float) -> float:
        with torch.no_grad():
            for p, slope in slopes:
                p.add_(slope, alpha=size)
        return (batch.weight * batch.mask * (scalar.values(batch).double() - targets).square()).sum().item()

    above, below = loss_after(step), loss_after(-2 * step)
    assert (above - below) / (2 * step) == pytest.approx(squared, rel=1e-2)


def test_it_learns_what_it_is_told(make_model: MakeModel, batch: Batch) -> None:
    scalar = make_model("moe")
    scalar.use_optimizer(OptimizerConfig(lr=0.01))
    targets = (batch.tokens % 3).float()
    whole = batch.with_(mask=torch.ones_like(batch.mask), weight=torch.full_like(batch.weight, 1 / len(batch.tokens)))
    losses = [scalar.update(whole, SquaredError(targets), lr=0.01).metrics["loss"] for _ in range(30)]
    assert losses[-1] < 0.2 * losses[0]


def test_any_function_of_values_and_tokens_is_a_loss(make_model: MakeModel, batch: Batch) -> None:
    def loss(values: torch.Tensor, scored: ScoredTokens) -> torch.Tensor:
        return values * scored.advantage + scored.tokens

    scalar = make_model()
    expected = (batch.weight * batch.mask * (scalar.values(batch) * batch.advantage + batch.tokens)).sum().item()
    assert scalar.gradients(batch, loss).metrics["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_loss_that_is_not_finite_names_sequence_and_token(make_model: MakeModel, batch: Batch) -> None:
    targets = torch.zeros(len(batch.tokens))
    place = int(batch.cu_seqlens[3]) + 5
    targets[place] = float("nan")
    with pytest.raises(FloatingPointError, match="token 5 of sequence 3 of the batch is nan"):
        make_model().gradients(batch, SquaredError(targets))


def test_a_batch_without_a_sequence(make_model: MakeModel, batch: Batch) -> None:
    scalar, nothing = make_model(), batch.select([])
    assert scalar.values(nothing).shape == (0,)
    assert scalar.gradients(nothing, SquaredError(torch.zeros(0))).metrics["loss"] == 0


def test_bf16_values_are_not_rounded_to_bf16(make_model: MakeModel, batch: Batch) -> None:
    exact, rounded = make_model().values(batch), make_model(dtype="bf16").values(batch)
    assert rounded.dtype is torch.float32
    assert not torch.equal(rounded, rounded.bfloat16().float())
    assert 0 < (exact - rounded).abs().mean() < 0.05


@pytest.mark.parametrize("model", ["dense", "tied", "latent"])
def test_it_starts_from_the_body_of_a_policy_s_checkpoint(
    model: str, make_model: MakeModel, make_policy: Callable[..., Policy], batch: Batch, tmp_path: Path
) -> None:
    """Whatever head that has; a critic's own checkpoint brings its head as well."""
    policy, scalar = make_policy(model, mtp_layers=1), make_model(model)
    policy.initialize(seed=8)
    checkpoint.save(tmp_path / "policy", policy, {})
    head = scalar.whole_weights()["scalar_head.weight"]
    with scalar.chunks.body_alone():
        checkpoint.load_weights(tmp_path / "policy", scalar)
    ours, theirs = scalar.whole_weights(), policy.whole_weights()
    assert torch.equal(ours.pop("scalar_head.weight"), head)
    assert theirs.keys() - ours.keys() == {k for k in theirs if k.startswith(("output_layer.", "mtp."))}
    assert all(torch.equal(whole, theirs[key]) for key, whole in ours.items())

    values = scalar.values(batch)
    checkpoint.save(tmp_path / "critic", scalar, {})
    other = make_model(model)
    other.initialize(seed=9)
    checkpoint.load_weights(tmp_path / "critic", other)
    assert torch.equal(other.values(batch), values)


def test_a_policy_s_checkpoint_alone_has_no_head_for_it(
    make_model: MakeModel, make_policy: Callable[..., Policy], tmp_path: Path
) -> None:
    checkpoint.save(tmp_path / "policy", make_policy(), {})
    with pytest.raises(Exception, match="scalar_head"):
        checkpoint.load_weights(tmp_path / "policy", make_model())


def test_nothing_as_large_as_the_vocabulary_is_built_or_computed(make_model: MakeModel, batch: Batch) -> None:
    vocabulary = 5000
    scalar = make_model(vocabulary=vocabulary)
    sizes = {name: p.numel() for name, p in scalar.chunks.named_parameters()}
    large = {name for name, size in sizes.items() if size >= vocabulary}
    assert large == {"chunks.0.embedding.word_embeddings.weight"}
    everything = pack_tokens([range(20)] * 20, [1] * 20)
    with LargestTensor() as scoring:
        scalar.values(everything)
    assert scoring.elements < vocabulary * DENSE.hidden
