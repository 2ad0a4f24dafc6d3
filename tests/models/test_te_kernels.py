"""Kernels of Transformer Engine: which fused ones a model uses; who may compute in 8 bits, and what that takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.fusions.fused_bias_geglu import quick_gelu, weighted_bias_quick_geglu_impl
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl, weighted_bias_swiglu_impl

from grpo_mega.config.load import compose_config
from grpo_mega.config.schema import LayoutConfig, ModelConfig, MoEConfig
from grpo_mega.errors import InputError
from grpo_mega.forecast.planning.inventory import StageInventory
from grpo_mega.forecast.planning.memory import eight_bits
from grpo_mega.models.families.gpt_oss import LIMIT
from grpo_mega.models.megatron.layers import _SwiGLU, gelu_tanh
from grpo_mega.models.megatron.packed import PackedTokens
from grpo_mega.models.megatron.te_kernels import check_eight_bits, eight_bit_options, fused_options
from grpo_mega.models.topology import Topology
from grpo_mega.platform import Platform

CPU = Platform(torch.device("cpu"), "gloo", transformer_engine=False)
GPU = Platform(torch.device("cuda"), "nccl", transformer_engine=True)
NAMES = ("moe_permute_fusion", "moe_router_fusion", "bias_activation_fusion")
silu = torch.nn.functional.silu


def test_a_process_without_transformer_engine_is_refused() -> None:
    check_eight_bits(LayoutConfig(), CPU)
    with pytest.raises(InputError, match="Transformer Engine on a GPU") as refused:
        check_eight_bits(LayoutConfig(fp8=True), CPU)
    assert (refused.value.where, refused.value.fix) == ("layout.fp8=true", "set layout.fp8=false")


@pytest.mark.parametrize(("capability", "allowed"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True)])
def test_a_gpu_that_is_too_old_is_refused(
    capability: tuple[int, int], allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    if allowed:
        check_eight_bits(LayoutConfig(fp8=True), GPU)
    else:
        with pytest.raises(InputError, match=rf"and this one has {capability[0]}\.{capability[1]}; set") as refused:
            check_eight_bits(LayoutConfig(fp8=True), GPU)
        assert refused.value.field == "layout.fp8"


def test_plans_and_other_layouts_have_no_options() -> None:
    assert not eight_bit_options(LayoutConfig(), GPU)
    assert not eight_bit_options(LayoutConfig(fp8=True), CPU)
    assert eight_bit_options(LayoutConfig(fp8=True), GPU)["fp8"] == "e4m3"


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (4, 1), (1, 2), (4, 4)])
def test_every_rank_has_whole_blocks_of_rows(tp: int, cp: int) -> None:
    topology = Topology(
        rank=0, world_size=1, tp_size=tp, pp_rank=0, pp_size=1, cp_rank=0, cp_size=cp, dp_rank=0, dp_size=1,
        replica_of_rank=[0], interleaved=False, fp8=True, lock_step=None,
    )  # fmt: skip
    packed = PackedTokens.of_sequences(torch.tensor([3, 500, 1]), topology.row_multiple * cp)
    assert packed.total % (128 * tp * cp) == 0
    assert replace(topology, fp8=False).row_multiple < topology.row_multiple


@pytest.mark.parametrize(("recompute", "copies"), [("full", 1 / 8), ("none", 3.0)])
def test_the_planner_counts_two_bytes_for_each_weight_that_waits_for_its_backward_pass(
    recompute: str, copies: float
) -> None:
    config = compose_config(["experiment=r1zero_671b", f"layout.recompute={recompute}"], checked=False)
    stage = StageInventory(
        layers=8, moe_layers=8, predictors=0, dense=1000, experts=3000, replicas=1, expert_replicas=1,
        trained_dense=1000, trained_experts=3000, whole={},
    )  # fmt: skip
    assert eight_bits(config.layout, stage, number=1) == 2 * 4000 * copies


@pytest.mark.parametrize(
    ("experts", "activation", "transformer_engine", "taken"),
    [
        (8, silu, True, NAMES),
        (8, quick_gelu, True, NAMES),
        (8, gelu_tanh, True, NAMES[:2]),  # Megatron has none of it
        (0, silu, True, NAMES[2:]),
        (8, silu, False, ()),
    ],
)
def test_what_is_taken(experts: int, activation: object, transformer_engine: bool, taken: tuple[str, ...]) -> None:
    options = fused_options(ModelConfig(moe=MoEConfig(experts=experts)), activation, transformer_engine)
    assert options == {name: name in taken for name in NAMES}


@given(rows=st.integers(1, 9), seed=st.integers(0, 99))
def test_fused_activations_are_those_that_they_replace(rows: int, seed: int) -> None:
    """Megatron's, compiled on a GPU and a chain of operations here, against the formulas, with their gradients."""
    torch.manual_seed(seed)
    x = (3 * torch.randn(rows, 16, dtype=torch.float64)).requires_grad_()
    weight = torch.rand(rows, 1, dtype=torch.float64).requires_grad_()
    a, b = x.chunk(2, -1)
    clamped = a.clamp(max=LIMIT), b.clamp(-LIMIT, LIMIT)
    pairs = [
        (bias_swiglu_impl(x, None), silu(a) * b),
        (bias_swiglu_impl(x[:, None], None), _SwiGLU.apply(x[:, None])),  # what dense layers have without a GPU
        (weighted_bias_swiglu_impl(x, None, weight), silu(a) * b * weight),
        (
            weighted_bias_quick_geglu_impl(x, None, weight, False, 1.0, LIMIT),
            quick_gelu(clamped[0]) * (clamped[1] + 1) * weight,
        ),
    ]
    for fused, plain in pairs:
        torch.testing.assert_close(fused, plain)
        grad = torch.randn_like(plain)
        of_fused = torch.autograd.grad(fused, (x, weight), grad, allow_unused=True)
        of_plain = torch.autograd.grad(plain, (x, weight), grad, allow_unused=True)
        torch.testing.assert_close(of_fused, of_plain)
