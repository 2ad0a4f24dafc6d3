"""The exchange of tokens between experts: which one a process uses, who is refused, and what a plan makes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from small_models import DENSE, MOE

from grpo_mega.config.load import compose_config
from grpo_mega.config.schema import ClusterConfig, LayoutConfig
from grpo_mega.models.megatron.dispatch import check_dispatch, dispatch_options
from grpo_mega.planning.hardware import RATES, machines_of
from grpo_mega.planning.training_time import exchange
from grpo_mega.platform import Platform

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
    with pytest.raises(
        ValueError, match=r"dispatch=deepep needs Transformer Engine on a GPU.*layout\.dispatch=alltoall"
    ):
        check_dispatch(DEEPEP, CPU)
    with pytest.raises(ValueError, match=r"dispatch=deepep needs the package deep_ep.*layout\.dispatch=alltoall"):
        check_dispatch(DEEPEP, GPU)


@pytest.mark.parametrize(("ep", "less"), [(8, False), (32, True)])
def test_a_plan_has_a_token_cross_to_a_machine_once(ep: int, less: bool) -> None:
    config = compose_config(["experiment=r1zero_671b", f"layout.ep={ep}"], checked=False)
    fused = replace(config, layout=replace(config.layout, dispatch="deepep"))
    machines = machines_of(ClusterConfig(gpu="h100"), 512)
    assert machines is not None
    usual, once = exchange(config, 1000.0, machines), exchange(fused, 1000.0, machines)
    assert once == exchange(config, 1000.0, replace(machines, rates=replace(RATES, once=True)))
    assert (once < usual) == less
