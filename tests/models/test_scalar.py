"""A model that gives one number for each token: which number, what it learns, and that it starts from a policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from largest_tensor import LargestTensor
from small_models import DENSE, MODELS, PLATFORM, VOCABULARY
from squared_error import squared_error

from grpo_mega.checkpoint import checkpoint
from grpo_mega.config.schema import LayoutConfig, OptimizerConfig
from grpo_mega.models.megatron.packed import PackedTokens
from grpo_mega.models.policy import Policy
from grpo_mega.models.scalar import ClippedSquaredError, ScalarModel
from grpo_mega.models.topology import Topology
from grpo_mega.types import Batch, ScoredTokens, pack_tokens
from grpo_mega.weights import directory as huggingface

MakeModel = Callable[..., ScalarModel]


@pytest.fixture
def make_model(topology: Topology) -> MakeModel:
    def make(
        model: str = "dense",
        vocabulary: int = VOCABULARY,
        trained: bool = True,
        distributed: bool = False,
        before: bool = False,
        **changes,
    ) -> ScalarModel:
        layout = LayoutConfig(micro_batch_tokens=30)
        optimizer = OptimizerConfig(distributed=distributed) if trained else None
        config = replace(MODELS[model], **changes)
        made = ScalarModel("critic", config, layout, vocabulary, topology, PLATFORM, optimizer=optimizer, before=before)
        made.initialize(seed=0)
        return made

    return make


def hidden_states(policy: Policy, batch: Batch) -> torch.Tensor:
    """[T, H] of every sequence alone, with the policy's body."""
    outcome = []
    for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        with torch.no_grad():
            outcome.append(
                policy.hidden_states(batch.tokens[start:end], PackedTokens.of_sequences(torch.tensor([end - start]), 1))
            )
    return torch.cat(outcome)


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


@pytest.mark.parametrize("model", MODELS)
def test_a_critic_s_value_is_that_of_the_tokens_before(model: str, make_model: MakeModel, batch: Batch) -> None:
    after, before = make_model(model).values(batch), make_model(model, before=True).values(batch)
    torch.testing.assert_close(before, torch.where(batch.mask, after.roll(1), 0.0), atol=1e-6, rtol=1e-5)
    assert before[batch.mask].std() > 0.01


def test_a_critic_s_router_makes_its_own_choices(make_model: MakeModel, batch: Batch) -> None:
    """Not those that an engine made for the policy."""
    critic, moe = make_model("moe", before=True), MODELS["moe"].moe
    layers = MODELS["moe"].layers - moe.first_dense
    replayed = batch.with_(experts=torch.zeros(len(batch.tokens), layers, moe.top_k, dtype=torch.int16))
    assert torch.equal(critic.values(replayed), critic.values(batch))


@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_critic_s_loss_and_gradient_are_those_of_the_formula(
    clip: float | None, make_model: MakeModel, batch: Batch
) -> None:
    critic = make_model(before=True)
    values = critic.values(batch)
    spread = 0.1 * torch.cos(torch.arange(len(values)))
    batch = batch.with_(value=values + spread, returns=values + spread.roll(3))
    v = values.double().requires_grad_()
    near = batch.value + (v - batch.value).clamp(-clip, clip) if clip else v
    errors = torch.maximum((v - batch.returns) ** 2, (near - batch.returns) ** 2) / 2
    expected = (batch.weight * batch.mask * errors).sum()
    (slope,) = torch.autograd.grad(expected, v)
    outcome = critic.gradients(batch, ClippedSquaredError(clip))
    assert outcome.metrics["loss"] == pytest.approx(expected.item(), rel=1e-5)
    of_head = critic.chunks.last.scalar_head.weight.main_grad[0].double()
    torch.testing.assert_close(of_head, slope @ states_before(critic, batch), atol=1e-6, rtol=1e-4)
    assert not clip or 0 < slope[batch.mask].count_nonzero() < batch.mask.sum(), "some are clipped, some are not"


def states_before(critic: ScalarModel, batch: Batch) -> torch.Tensor:
    """[T, H] hidden state before each masked-in token, as heads with a single 1 give it; 0 elsewhere."""
    head, channels = critic.chunks.last.scalar_head.weight, []
    for channel in range(head.shape[1]):
        with torch.no_grad():
            head.zero_()[0, channel] = 1.0
        channels.append(critic.values(batch))
    return torch.stack(channels, 1).double()


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_the_loss_is_the_weighted_sum_and_the_gradient_its_slope(
    model: str, make_model: MakeModel, batch: Batch
) -> None:
    scalar, targets = make_model(model), torch.linspace(-1, 1, len(batch.tokens))
    values = scalar.values(batch).double()
    expected = (batch.weight * batch.mask * (values - targets).square()).sum().item()
    outcome = scalar.gradients(batch, squared_error(targets))
    assert outcome.metrics["loss"] == pytest.approx(expected, rel=1e-5)
    assert outcome.metrics["value"] == pytest.approx(values[batch.mask].mean().item(), rel=1e-4)
    torch.testing.assert_close(outcome.outputs, values.float() * batch.mask, atol=1e-6, rtol=1e-5)
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
    losses = [scalar.update(whole, squared_error(targets), lr=0.01).metrics["loss"] for _ in range(30)]
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
        make_model().gradients(batch, squared_error(targets))


def test_a_batch_without_a_sequence(make_model: MakeModel, batch: Batch) -> None:
    scalar, nothing = make_model(), batch.select([])
    assert scalar.values(nothing).shape == (0,)
    assert scalar.gradients(nothing, squared_error(torch.zeros(0))).metrics["loss"] == 0


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
    checkpoint.save(tmp_path / "policy", [policy], {})
    head = scalar.whole_weights()["scalar_head.weight"]
    with scalar.chunks.body_alone():
        checkpoint.load_weights(tmp_path / "policy", scalar, role="policy")
    ours, theirs = scalar.whole_weights(), policy.whole_weights()
    assert torch.equal(ours.pop("scalar_head.weight"), head)
    assert theirs.keys() - ours.keys() == {k for k in theirs if k.startswith(("output_layer.", "mtp."))}
    assert all(torch.equal(whole, theirs[key]) for key, whole in ours.items())

    values = scalar.values(batch)
    checkpoint.save(tmp_path / "critic", [scalar], {})
    other = make_model(model)
    other.initialize(seed=9)
    checkpoint.load_weights(tmp_path / "critic", other)
    assert torch.equal(other.values(batch), values)


@pytest.mark.parametrize("model", ["dense", "tied", "moe"])
def test_it_starts_from_the_body_of_a_policy(
    model: str, make_model: MakeModel, make_policy: Callable[..., Policy], batch: Batch
) -> None:
    """With the biases of its routers, which are buffers, and a head of 0."""
    policy, scalar = make_policy(model, mtp_layers=0), make_model(model)
    policy.initialize(seed=8)
    biases = [buffer for name, buffer in policy.chunks.named_buffers() if name.endswith("expert_bias")]
    assert bool(biases) == (model == "moe")
    for bias in biases:
        bias.copy_(torch.linspace(-3, 3, len(bias)))
    scalar.take_body(policy)
    ours, theirs = scalar.whole_weights(), policy.whole_weights()
    assert not ours.pop("scalar_head.weight").any()
    assert theirs.keys() - ours.keys() == {key for key in theirs if key.startswith("output_layer.")}
    assert [key for key, whole in ours.items() if not torch.equal(whole, theirs[key])] == []
    assert not scalar.values(batch).any()


@pytest.mark.parametrize("model", ["dense", "tied", "moe"])
def test_it_starts_from_the_body_in_a_hugging_face_folder(
    model: str, make_model: MakeModel, make_policy: Callable[..., Policy], tmp_path: Path
) -> None:
    """Also where embeddings and output are one in the folder; the head, of which it knows nothing, stays."""
    policy, scalar = make_policy(model), make_model(model)
    policy.initialize(seed=8)
    huggingface.save(tmp_path / "folder", policy)
    head = scalar.whole_weights()["scalar_head.weight"]
    huggingface.load_weights(tmp_path / "folder", scalar, whole=policy.architecture)
    ours, theirs = scalar.whole_weights(), policy.whole_weights()
    assert torch.equal(ours.pop("scalar_head.weight"), head)
    embedding = "embedding.word_embeddings.weight"  # whose rows after the vocabulary no folder has
    assert torch.equal(ours.pop(embedding)[:VOCABULARY], theirs[embedding][:VOCABULARY])
    assert all(torch.equal(whole, theirs[key]) for key, whole in ours.items())
    scalar.reset_head()
    assert not scalar.whole_weights()["scalar_head.weight"].any()
    assert head.any()


def test_a_policy_s_checkpoint_alone_has_no_head_for_it(
    make_model: MakeModel, make_policy: Callable[..., Policy], tmp_path: Path
) -> None:
    checkpoint.save(tmp_path / "policy", [make_policy()], {})
    with pytest.raises(Exception, match="scalar_head"):
        checkpoint.load_weights(tmp_path / "policy", make_model(), role="policy")
    with pytest.raises(ValueError, match=r"it has no critic \(no critic/\)"):
        checkpoint.load_weights(tmp_path / "policy", make_model())


@pytest.mark.parametrize("distributed", [False, True], ids=["whole", "distributed"])
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_a_model_that_is_never_trained_holds_weights_alone_and_gives_the_same_values(
    model: str, distributed: bool, make_model: MakeModel, batch: Batch
) -> None:
    def buffers(scalar: ScalarModel) -> int:
        held = (b for chunk in scalar.ddp_chunks for b in chunk.buffers + chunk.expert_parallel_buffers)
        return sum(buffer.grad_data.nbytes for buffer in held)

    trained, frozen = (
        make_model(model, distributed=distributed),
        make_model(model, trained=False, distributed=distributed),
    )
    assert trained.parameters() == frozen.parameters()
    # Balancing biases have no gradients.
    assert buffers(trained) >= 4 * sum(p.numel() for p in trained.chunks.parameters()) > 0
    assert buffers(frozen) == 0
    assert not any(hasattr(p, "main_grad") or p.requires_grad for p in frozen.chunks.parameters())
    # torch multiplies matrices in another order where no gradient can be asked for.
    torch.testing.assert_close(frozen.values(batch), trained.values(batch), atol=1e-6, rtol=1e-5)


def test_a_model_that_is_never_trained_refuses_to_be(make_model: MakeModel, batch: Batch) -> None:
    frozen = make_model(trained=False)
    with pytest.raises(RuntimeError, match="the critic was built with optimizer=None"):
        frozen.gradients(batch, squared_error(torch.zeros(len(batch.tokens))))
    with pytest.raises(RuntimeError, match="the critic was built with optimizer=None"):
        frozen.use_optimizer(OptimizerConfig(lr=0.01))


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
