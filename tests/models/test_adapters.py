"""Adapters (LoRA): the policy is the model with B A in its weights, nothing else moves, a reference is small."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch

from grpo_mega.algorithm.objective import negative_log_likelihood
from grpo_mega.config.schema import LoRAConfig, MLAConfig, MoEConfig, OptimizerConfig
from grpo_mega.models.adapters import A, B, is_adapter
from grpo_mega.models.policy import Policy
from grpo_mega.models.reference import ReferencePolicy
from grpo_mega.models.shards import named_box, shards
from grpo_mega.types import Batch
from grpo_mega.weights.merging import parts_of
from grpo_mega.weights.names import entries
from grpo_mega.weights.stream import hf_buckets

LORA = LoRAConfig(rank=3, alpha=4.5)
MOE = MoEConfig(experts=4, ffn_hidden=16, shared_ffn_hidden=16, first_dense=1, bias_update_rate=0.0, frozen_bias=True)
ARCHITECTURES = {
    "grouped": {"qkv_bias": True, "moe": MoEConfig()},
    "experts": {"moe": MOE},
    "latent": {"moe": MOE, "kv_heads": 4, "attention": "mla", "mla": MLAConfig(v_head_dim=12), "qk_norm": True},
    "gpt_oss": {
        "family": "gpt_oss", "qkv_bias": True, "window": 5, "full_every": 2, "ffn_hidden": 16,
        "moe": MoEConfig(experts=4, ffn_hidden=16, score="softmax", bias_update_rate=0.0),
    },
}  # fmt: skip

MakePolicy = Callable[..., Policy]


@pytest.fixture(params=ARCHITECTURES)
def make_one(request: pytest.FixtureRequest, make_policy: MakePolicy) -> MakePolicy:
    """Makes policies of one architecture and the same weights, all but the adapters."""

    def make(lora: LoRAConfig | None = LORA, **changes: object) -> Policy:
        return make_policy("dense", lora=lora, **(ARCHITECTURES[request.param] | changes))

    return make


def train_adapters(policy: Policy) -> None:
    """Gives every B other values than the first ones, which are 0."""
    generator = torch.Generator().manual_seed(9)
    for shard in shards(policy.chunks):
        if named_box(shard)[0].endswith(B):
            shard.data.copy_(torch.randn(shard.data.shape, generator=generator) / 3)


def base(policy: Policy) -> dict[str, torch.Tensor]:
    """Copies of all that is not an adapter, buffers included."""
    named = [*policy.chunks.named_parameters(), *policy.chunks.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named if not is_adapter(name)}


def load(policy: Policy, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Puts Hugging Face tensors into a policy."""
    named, wanted = dict(tensors), entries(policy.architecture, policy.vocab_size)
    parts = parts_of(policy, wanted)
    for entry in wanted:
        for box, part in parts.held[entry.key].items():
            for source, target in entry.overlap(box):
                part[source] = entry.inwards(named[entry.name][target])


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def test_the_policy_is_the_merged_model(make_one: MakePolicy, batch: Batch) -> None:
    policy, merged = make_one(), make_one(lora=None)
    train_adapters(policy)
    without = merged.logprobs(batch, 0.9)
    before = base(policy)
    load(merged, [pair for bucket in hf_buckets(policy, 10**9) for pair in bucket])
    expected = merged.logprobs(batch, 0.9)
    assert (expected - without).abs().max() > 0.3
    assert (policy.logprobs(batch, 0.9) - expected).abs().max() < 1e-5
    assert_same(base(policy), before)


def test_it_begins_as_the_model_without(make_one: MakePolicy, batch: Batch) -> None:
    policy = make_one()
    off = policy.logprobs(batch, 0.9) - make_one(lora=None).logprobs(batch, 0.9)
    assert off.abs().max() < 1e-5  # torch multiplies by a weight without gradient in another order
    values = {name: p for name, p in policy.chunks.named_parameters() if is_adapter(name)}
    assert all(p.any() == name.endswith(A) for name, p in values.items())
    for name, p in values.items():  # uniform within 1 / sqrt(inputs), as `peft` has it
        assert not name.endswith(A) or 0.8 < p.abs().max() * p.shape[1] ** 0.5 <= 1, name
    assert len({p.sum().item() for name, p in values.items() if name.endswith(A)}) == len(values) / 2


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_update_moves_adapters_alone(make_one: MakePolicy, batch: Batch, dtype: str) -> None:
    policy = make_one(dtype=dtype)
    policy.use_optimizer(OptimizerConfig(lr=0.05, weight_decay=0.1))
    before = base(policy)
    first = {name: p.detach().clone() for name, p in policy.chunks.named_parameters() if is_adapter(name)}
    losses = [policy.update(batch, negative_log_likelihood, lr=0.05).metrics["loss"] for _ in range(3)]
    assert_same(base(policy), before)
    assert losses[2] < losses[0]
    named = dict(policy.chunks.named_parameters())
    assert not any(torch.equal(named[name], p) for name, p in first.items())


def test_frozen_weights_have_neither_gradients_nor_moments(make_one: MakePolicy) -> None:
    policy = make_one()
    policy.use_optimizer(OptimizerConfig(lr=0.05))
    trained = sum(p.numel() for name, p in policy.chunks.named_parameters() if is_adapter(name))
    everything = sum(p.numel() for p in policy.chunks.parameters())
    buffers = [b for chunk in policy.ddp_chunks for b in chunk.buffers + chunk.expert_parallel_buffers]
    assert sum(buffer.grad_data.numel() for buffer in buffers) < 1.1 * trained < everything / 2
    assert sum(p.numel() for group in policy.optimizer.param_groups for p in group["params"]) == trained


def test_the_reference_is_a_copy_of_the_adapters(make_one: MakePolicy, batch: Batch) -> None:
    policy = make_one()
    policy.use_optimizer(OptimizerConfig(lr=0.05))
    reference, old = ReferencePolicy(policy), policy.logprobs(batch, 0.9)
    before = base(policy)
    policy.update(batch, negative_log_likelihood, lr=0.05)
    new = policy.logprobs(batch, 0.9)
    assert torch.equal(reference.logprobs(batch, 0.9), old)
    assert torch.equal(policy.logprobs(batch, 0.9), new)
    assert not torch.equal(new[batch.mask], old[batch.mask])
    assert_same(base(policy), before)
    buffers = sum(buffer.numel() for buffer in policy.chunks.buffers())
    trained = sum(p.numel() for name, p in policy.chunks.named_parameters() if is_adapter(name))
    assert sum(tensor.numel() for tensor in reference.held) == trained + buffers


def test_targets_name_what_gets_adapters(make_policy: MakePolicy) -> None:
    def adapted(*targets: str) -> set[str]:
        policy = make_policy("dense", lora=replace(LORA, targets=[*targets]), moe=MOE)
        names = (name for name, _ in policy.chunks.named_parameters() if is_adapter(name))
        return {name.partition(".layers.")[2].rpartition(".adapter.")[0] for name in names}

    attention = {f"{n}.self_attention.{part}" for n in (0, 1) for part in ("linear_qkv", "linear_proj")}
    fc = ("linear_fc1", "linear_fc2")
    mlp = {f"{room}.{part}" for room in ("0.mlp", "1.mlp.shared_experts") for part in fc}
    experts = {f"1.mlp.experts.local_experts.{n}.{part}" for n in range(4) for part in fc}
    assert adapted("attention") == attention
    assert adapted("mlp") == mlp
    assert adapted("experts") == experts
    assert adapted("attention", "mlp", "experts") == attention | mlp | experts


def test_experts_alone_can_be_trained(make_policy: MakePolicy, batch: Batch) -> None:
    """Megatron's optimizer of dense parameters then has none."""
    policy = make_policy("dense", lora=replace(LORA, targets=["experts"]), moe=MOE)
    policy.initialize_adapters(seed=4)
    policy.use_optimizer(OptimizerConfig(lr=0.1))
    before, old = base(policy), policy.logprobs(batch, 1.0)
    policy.update(batch, negative_log_likelihood, lr=0.1)
    assert not torch.equal(policy.logprobs(batch, 1.0), old)
    assert_same(base(policy), before)


def test_every_seed_has_weights_and_adapters_of_its_own(make_policy: MakePolicy) -> None:
    policy = make_policy("dense", lora=LORA)
    seen: dict[str, set[str]] = {}
    for seed in (0, 1, 2, 2**31, 2**32 - 1):
        policy.initialize(seed)
        policy.initialize_adapters(seed)
        for name, parameter in policy.chunks.named_parameters():
            seen.setdefault(name, set()).add(str(parameter.flatten().tolist()))
    same_for_all = {name for name, values in seen.items() if "norm" in name or name.endswith((B, "bias"))}
    assert same_for_all
    assert {name: len(values) for name, values in seen.items()} == {n: 1 if n in same_for_all else 5 for n in seen}


def test_the_scale_is_alpha_over_rank(make_policy: MakePolicy, batch: Batch) -> None:
    """Four times alpha is as four times B."""
    strong = make_policy("dense", lora=replace(LORA, alpha=4 * LORA.alpha))
    weak = make_policy("dense", lora=LORA)
    for policy in (strong, weak):
        train_adapters(policy)
    once = weak.logprobs(batch, 0.9)
    for shard in shards(weak.chunks):
        if named_box(shard)[0].endswith(B):
            shard.data.mul_(4)
    assert not torch.allclose(once, strong.logprobs(batch, 0.9), atol=0.1)
    assert (weak.logprobs(batch, 0.9) - strong.logprobs(batch, 0.9)).abs().max() < 1e-5
