"""Matrix products in 8 bits: who may compute so, how rows are padded, and what the planner counts for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from grpo_mega.config.load import compose_config
from grpo_mega.config.schema import LayoutConfig
from grpo_mega.forecast.planning.inventory import StageInventory
from grpo_mega.forecast.planning.memory import eight_bits
from grpo_mega.models.megatron.eight_bits import check_eight_bits, eight_bit_options
from grpo_mega.models.megatron.packed import PackedTokens
from grpo_mega.models.topology import Topology
from grpo_mega.platform import Platform

CPU = Platform(torch.device("cpu"), "gloo", transformer_engine=False)
GPU = Platform(torch.device("cuda"), "nccl", transformer_engine=True)


def test_a_process_without_transformer_engine_is_refused() -> None:
    check_eight_bits(LayoutConfig(), CPU)
    with pytest.raises(ValueError, match=r"layout\.fp8=true needs Transformer Engine on a GPU.*set layout\.fp8=false"):
        check_eight_bits(LayoutConfig(fp8=True), CPU)


@pytest.mark.parametrize(("capability", "allowed"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True)])
def test_a_gpu_that_is_too_old_is_refused(
    capability: tuple[int, int], allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    if allowed:
        check_eight_bits(LayoutConfig(fp8=True), GPU)
    else:
        with pytest.raises(ValueError, match=rf"and this one has {capability[0]}\.{capability[1]}; set"):
            check_eight_bits(LayoutConfig(fp8=True), GPU)


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
