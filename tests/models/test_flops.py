"""Operations that learning needs: those that torch counts in a real pass, and what is known of released models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from composed import composed
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from grpo_mega.algorithm.objective import negative_log_likelihood
from grpo_mega.config.schema import LoRAConfig, ModelConfig
from grpo_mega.models.flops import attention_flops, layer_weights, learning_flops
from grpo_mega.models.megatron.packed import sees
from grpo_mega.models.policy import Policy
from grpo_mega.types import Batch

MakePolicy = Callable[..., Policy]
LAYERS = "DistributedDataParallel.module.decoder"


def counted(policy: Policy, batch: Batch) -> int:
    """Operations of products with weights in the layers, forward and backward, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        policy.gradients(batch, negative_log_likelihood)
    return counter.get_flop_counts()[LAYERS][torch.ops.aten.mm]


@pytest.mark.parametrize("model", ["dense", "moe", "latent", "tied"])
def test_products_of_the_layers_are_those_that_torch_counts(model: str, make_policy: MakePolicy, batch: Batch) -> None:
    policy = make_policy(model)
    needed = 3 * 2 * len(batch.tokens) * layer_weights(policy.architecture)
    # Routers count the tokens of experts by a product, too.
    assert counted(policy, batch) == pytest.approx(needed, rel=0 if model in ("dense", "tied") else 3e-4)


def test_adapters_leave_out_the_gradients_of_weights(make_policy: MakePolicy, batch: Batch) -> None:
    """But for the first layer's input, of which nobody needs a gradient; and for their own products."""
    policy = make_policy("dense", lora=LoRAConfig(rank=1))
    needed = 2 * 2 * len(batch.tokens) * layer_weights(policy.architecture)
    assert counted(policy, batch) == pytest.approx(needed, rel=0.2)


def test_a_model_adds_up_what_its_updates_have_needed(make_policy: MakePolicy, batch: Batch) -> None:
    policy = make_policy("dense")
    for _ in range(2):
        policy.gradients(batch, negative_log_likelihood)
    policy.logprobs(batch, 1.0)
    lengths, scored = [7, 20, 2, 11, 5, 5, 16, 3, 9], int(batch.mask.sum())
    assert policy.flops == pytest.approx(2 * learning_flops(policy.architecture, 21, lengths, scored))


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    window=st.none() | st.integers(1, 40),
    full_every=st.integers(0, 3),
)
def test_attention_is_of_the_pairs_that_see_each_other(lengths: list[int], window: int | None, full_every: int) -> None:
    model = ModelConfig(
        layers=3, hidden=32, heads=4, kv_heads=2, ffn_hidden=48, context=64, window=window, full_every=full_every
    )
    pairs = 0
    for layer in (1, 2, 3):
        seen = None if full_every and layer % full_every == 0 else window
        for length in lengths:
            positions = torch.arange(length)
            pairs += int(sees(positions[:, None], positions, seen).sum())
    assert attention_flops(model, lengths) == 2 * pairs * 4 * (8 + 8)


@pytest.mark.parametrize(
    ("experiment", "active"),
    [("deepseekmath_7b", 6.5e9), ("r1zero_671b", 36.6e9)],
)
def test_released_models_have_as_many_weights_at_work_as_their_papers_say(experiment: str, active: float) -> None:
    """DeepSeek-V3: 37 billion for a token, 0.9 of them its embedding's; DeepSeekMath: 6.9, of which 0.4."""
    model = composed(f"experiment={experiment}").model
    model.mtp_layers = 0
    found = layer_weights(model) + model.hidden * (model.vocab_size or 0)
    assert found == pytest.approx(active, rel=0.01)
