"""The exchange of tokens between experts: which one a process uses, who is refused, and what a plan makes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from small_models import DENSE, MOE, PLATFORM, VOCABULARY

from grpo_kernels import LossOptions
from grpo_mega.algorithm.objective import grpo_loss
from grpo_mega.config.load import compose_config
from grpo_mega.config.schema import ClusterConfig, LayoutConfig
from grpo_mega.errors import InputError
from grpo_mega.forecast.planning.hardware import RATES, machines_of
from grpo_mega.forecast.planning.memory import Trainer
from grpo_mega.forecast.planning.training_time import exchange
from grpo_mega.models.megatron.dispatch import check_dispatch, dispatch_options
from grpo_mega.models.policy import Policy
from grpo_mega.models.topology import Topology
from grpo_mega.platform import Platform
from grpo_mega.types import Batch

CPU = Platform(torch.device("cpu"), "gloo", transformer_engine=False)
GPU = Platform(torch.device("cuda"), "nccl", transformer_engine=True)
DEEPEP = LayoutConfig(ep=8, dispatch="deepep")


def test_megatron_takes_the_settings_of_deepep() -> None:
    sizes = dict(num_layers=2, hidden_size=32, num_attention_heads=4, num_moe_experts=8, moe_ffn_hidden_size=16)
    config = TransformerConfig(**sizes, expert_model_parallel_size=8, **dispatch_options(MOE, DEEPEP, GPU))
    assert (config.moe_token_dispatcher_type, config.moe_flex_dispatcher_backend) == ("flex", "deepep")


def test_plans_dense_models_and_other_layouts_have_the_all_to_all() -> None:
    usual = {"moe_token_dispatcher_type": "alltoall"}
    assert dispatch_options(MOE, LayoutConfig(ep=8), GPU) == usual
    assert dispatch_options(MOE, DEEPEP, CPU) == usual
    assert dispatch_options(DENSE, DEEPEP, GPU) == usual


def test_a_process_that_cannot_run_deepep_is_refused() -> None:
    check_dispatch(LayoutConfig(ep=8), CPU)
    for here, missing in ((CPU, "Transformer Engine on a GPU"), (GPU, "the package deep_ep")):
        with pytest.raises(InputError, match=missing) as refused:
            check_dispatch(DEEPEP, here)
        assert (refused.value.where, refused.value.fix) == ("layout.dispatch=deepep", "set layout.dispatch=alltoall")


@pytest.mark.parametrize(("ep", "less"), [(8, False), (32, True)])
def test_a_plan_has_a_token_cross_to_a_machine_once(ep: int, less: bool) -> None:
    config = compose_config(["experiment=r1zero_671b", f"layout.ep={ep}"], checked=False)
    fused = replace(config, layout=replace(config.layout, dispatch="deepep"))
    machines = machines_of(ClusterConfig(gpu="h100"), 512)
    assert machines is not None
    usual, once = (exchange(Trainer.of(each), 1000.0, machines) for each in (config, fused))
    assert once == exchange(Trainer.of(config), 1000.0, replace(machines, rates=replace(RATES, once=True)))
    assert (once < usual) == less


def test_a_layer_that_is_recomputed_exchanges_the_same_tokens(topology: Topology, batch: Batch) -> None:
    """Even if its router chooses others: between two ranks the numbers would not be those of the tokens."""
    layout = LayoutConfig(recompute="full", micro_batch_tokens=40)
    policy = Policy(MOE, layout, VOCABULARY, topology, PLATFORM)
    policy.initialize(seed=0)
    layers = [module for module in policy.chunks.modules() if isinstance(module, MoELayer)]
    chosen: dict[bool, list[list[int]]] = {False: [], True: []}
    sent: dict[bool, list[list[int]]] = {False: [], True: []}

    def choose_others(_: Any, __: Any, routing: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        probs, experts = (x.roll(1, 1) if torch.is_grad_enabled() else x for x in routing)
        chosen[torch.is_grad_enabled()].append(experts.sum(0).tolist())
        return probs, experts

    def note(_: Any, arguments: tuple[Any, ...]) -> None:
        sent[torch.is_grad_enabled()].append(arguments[1].tolist())

    for layer in layers:
        layer.router.register_forward_hook(choose_others)
        layer.experts.register_forward_pre_hook(note)
    policy.gradients(batch, grpo_loss(LossOptions(), True))
    assert len(sent[True]) == len(sent[False]) >= 2 * len(layers)  # several micro-batches
    assert sorted(sent[True]) == sorted(sent[False]) == sorted(chosen[False]) != sorted(chosen[True])
    assert not any(layer.router.packed.exchanges for layer in layers)


def test_a_micro_batch_that_is_scored_remembers_no_exchange(topology: Topology, batch: Batch) -> None:
    layout = LayoutConfig(recompute="full")
    policy = Policy(MOE, layout, VOCABULARY, topology, PLATFORM)
    policy.initialize(seed=0)
    policy.logprobs(batch, 1.0)
    layers = [module for module in policy.chunks.modules() if isinstance(module, MoELayer)]
    assert layers
    assert not any(layer.router.packed.exchanges for layer in layers)
