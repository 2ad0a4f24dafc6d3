"""Parts of a model: every parameter is in one, each has its own rate and decay, frozen ones are not trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from grpo_mega.algorithm.objective import negative_log_likelihood
from grpo_mega.config.schema import OptimizerConfig, PartConfig, PartsConfig
from grpo_mega.models.finite import refuse_non_finite_gradients
from grpo_mega.models.model import Pass
from grpo_mega.models.parts import part_of, settings_of
from grpo_mega.models.policy import Policy
from grpo_mega.types import Batch

MakePolicy = Callable[..., Policy]
MODELS = ["dense", "moe", "latent", "tied"]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("module.module.embedding.word_embeddings.weight", "embedding"),
        ("output_layer.weight", "head"),
        ("scalar_head.weight", "head"),
        ("decoder.layers.0.self_attention.linear_qkv.bias", "attention"),
        ("decoder.layers.0.self_attention.q_layernorm.weight", "norms"),
        ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", "norms"),
        ("decoder.layers.1.mlp.linear_fc1.weight", "mlp"),
        ("decoder.layers.1.mlp.shared_experts.linear_fc2.weight", "mlp"),
        ("decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight", "experts"),
        ("decoder.layers.1.mlp.experts.linear_fc1.weight7", "experts"),
        ("decoder.layers.1.mlp.router.weight", "router"),
        ("decoder.final_layernorm.weight", "norms"),
        ("mtp.layers.0.transformer_layer.mlp.router.weight", "predictors"),
        ("mtp.layers.0.enorm.weight", "predictors"),
    ],
)
def test_names_of_megatron_and_of_transformer_engine(name: str, part: str) -> None:
    assert part_of(name, tied=False) == part


def test_with_tied_embeddings_every_copy_is_the_embedding() -> None:
    assert part_of("output_layer.weight", tied=True) == "embedding"


def test_a_parameter_of_no_part_is_named() -> None:
    with pytest.raises(ValueError, match=r"decoder\.layers\.0\.surprise\.weight belongs to no part"):
        part_of("decoder.layers.0.surprise.weight", tied=False)


OWN = PartsConfig(
    embedding=PartConfig(0.5, 0.0),
    head=PartConfig(1.0, 0.3),
    attention=PartConfig(2.0, 0.375),
    mlp=PartConfig(3.0, 0.25),
    experts=PartConfig(0.25, 0.125),
    router=PartConfig(0.1, 0.3),
    norms=PartConfig(7.0),
)


@pytest.mark.parametrize("common", [0.0, 0.5])
@pytest.mark.parametrize("model", MODELS)
def test_each_part_decays_at_its_own_rate(make_policy: MakePolicy, model: str, common: float) -> None:
    policy, tied = make_policy(model, qkv_bias=model != "latent"), model == "tied"
    with torch.no_grad():
        for p in policy.chunks.parameters():
            p.add_(0.5)  # biases are 0
    policy.use_optimizer(OptimizerConfig(lr=0.1, weight_decay=common, parts=OWN))
    before = {name: p.detach().clone() for name, p in policy.chunks.named_parameters()}
    policy.ddp_chunks[0].zero_grad_buffer()  # without gradients Adam moves nothing: what moves has decayed
    policy.apply(Pass(torch.zeros(0), {}, {}, 0, torch.zeros(0)), lr=0.1)
    for name, p in policy.chunks.named_parameters():
        own = settings_of(OWN)[part_of(name, tied)]
        decay = common if own.weight_decay is None else own.weight_decay
        expected = before[name] if p.dim() == 1 else before[name] * (1 - 0.1 * own.lr_multiplier * decay)
        torch.testing.assert_close(p.detach(), expected, msg=name)


@pytest.mark.parametrize("model", MODELS)
def test_each_part_moves_at_its_own_rate(make_policy: MakePolicy, batch: Batch, model: str) -> None:
    rates = PartsConfig(**{name: PartConfig(own.lr_multiplier) for name, own in settings_of(OWN).items()})
    moved = {}
    for name, parts in (("alike", PartsConfig()), ("own", rates)):
        policy = make_policy(model)
        before = policy.whole_weights()
        train(policy, batch, updates=1, parts=parts, lr=1e-3)
        moved[name] = {key: whole - before[key] for key, whole in policy.whole_weights().items()}
    for key in (key for key in moved["own"] if "expert_bias" not in key):
        multiplier = settings_of(OWN)[part_of(key, model == "tied")].lr_multiplier
        assert moved["alike"][key].any()
        torch.testing.assert_close(moved["own"][key], moved["alike"][key] * multiplier, rtol=1e-3, atol=1e-6, msg=key)


def train(policy: Policy, batch: Batch, updates: int, **settings: Any) -> list[Pass]:
    """Some updates on the likelihood of a batch."""
    policy.use_optimizer(OptimizerConfig(**{"lr": 0.01, "clip_grad": 0.0} | settings))
    lr = settings.get("lr", 0.01)
    return [policy.update(batch, negative_log_likelihood, lr) for _ in range(updates)]


FROZEN = [
    ("dense", ["head"]),
    ("dense", ["embedding", "attention", "mlp", "norms"]),
    ("moe", ["embedding", "router", "norms"]),
    ("moe", ["experts"]),
    ("latent", ["attention", "mlp"]),
    ("tied", ["embedding"]),
]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("model", "frozen"), FROZEN)
def test_frozen_parts_keep_their_bits_and_take_no_memory(
    make_policy: MakePolicy, batch: Batch, model: str, frozen: list[str], dtype: str
) -> None:
    policy, tied = make_policy(model, dtype=dtype, frozen=frozen), model == "tied"
    before = {name: p.detach().clone() for name, p in policy.chunks.named_parameters()}
    train(policy, batch, updates=2, weight_decay=0.1)
    size = 0
    for name, p in policy.chunks.named_parameters():
        is_frozen = part_of(name, tied) in frozen
        assert torch.equal(p, before[name]) == is_frozen, name
        assert hasattr(p, "main_grad") != is_frozen, name
        size += 0 if is_frozen else p.numel()
    chunk = policy.ddp_chunks[0]
    buffers = chunk.buffers + chunk.expert_parallel_buffers
    assert sum(p.numel() for buffer in buffers for p in buffer.params) == size
    moments = [s["exp_avg"] for part in policy.optimizer.chained_optimizers for s in part.optimizer.state.values()]
    assert sum(m.numel() for m in moments) == size


@pytest.mark.parametrize(("model", "frozen"), FROZEN)
def test_the_others_have_the_same_gradients_as_before_and_they_alone_are_in_the_norm(
    make_policy: MakePolicy, batch: Batch, model: str, frozen: list[str]
) -> None:
    whole, part = make_policy(model), make_policy(model, frozen=frozen)
    for policy in (whole, part):
        policy.gradients(batch, negative_log_likelihood)
    found, expected = part.whole_gradients(), whole.whole_gradients()
    assert found.keys() == {key for key in expected if part_of(key, model == "tied") not in frozen}
    for key in found:
        assert (found[key] - expected[key]).norm() <= 5e-6 * expected[key].norm(), key
    (update,) = train(part, batch, updates=1)
    norm = torch.stack([expected[key].double().norm() for key in found]).norm().item()
    assert update.metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_a_gradient_that_is_not_finite_is_named_beside_frozen_parts(make_policy: MakePolicy, batch: Batch) -> None:
    policy = make_policy("dense", frozen=["embedding"])
    policy.gradients(batch, negative_log_likelihood)
    policy.chunks.last.output_layer.weight.main_grad[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match=r"output_layer\.weight \(up to nan, rank 0\)"):
        refuse_non_finite_gradients(policy.chunks, policy.ddp_chunks)
