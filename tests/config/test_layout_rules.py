"""Rules about layouts: accepted exactly where Megatron can build them, with advice that solves the problem."""

from __future__ import annotations

import re

import pytest
from composed import composed
from hypothesis import given, settings
from hypothesis import strategies as st
from ruled import DENSE, TINY, problems_of, with_values

from grpo_mega.config.rules import check_backend
from grpo_mega.errors import ConfigError


def test_reduction_without_replicas_is_turned_off_by_the_override_that_is_advised() -> None:
    (problem,) = problems_of(with_values(DENSE, {"optimizer.overlap": True}), 1)
    assert "optimizer.overlap=false" in problem.fix


def test_a_released_model_keeps_its_shape() -> None:
    with pytest.raises(ConfigError) as refused:
        composed("experiment=qwen3_30b_a3b", "layout.tp=8")
    (problem,) = (one for one in refused.value.problems if one.field == "model.kv_heads")
    assert problem.fix == "choose layout.tp=4"


def test_a_lone_process_is_told_of_the_layout_for_one() -> None:
    for size in ("layout.tp", "layout.ep"):
        (problem,) = problems_of(with_values(TINY, {"layout.ep": 1} | {size: 2}), 1)
        assert problem.fix == "start 2 processes (torchrun --nproc-per-node), or choose layout=single"


def test_stages_that_leave_nothing_for_the_others_are_named() -> None:
    values = {"model.layers": 4, "layout.pp": 2, "layout.last_stage_layers": 4}
    (problem,) = problems_of(with_values(TINY, values))
    assert "layout.last_stage_layers=4 leave 0 layers" in problem.what


def test_a_smaller_expert_parallel_size_fits_the_processes_too() -> None:
    config = with_values(TINY, {"model.moe.experts": 6, "layout.ep": 4})
    (problem,) = problems_of(config)
    (size,) = advised(r"layout.ep=(\d+)$", problem.fix)
    config = with_values(config, {"layout.ep": size})
    assert problems_of(config) == problems_of(config, 4) == []


LAYOUTS = st.fixed_dictionaries({
    "layout.tp": st.integers(1, 6),
    "layout.pp": st.integers(1, 6),
    "layout.ep": st.integers(1, 6),
    "layout.etp": st.integers(1, 3),
    "algorithm.prompts_per_step": st.integers(1, 40),
})  # fmt: skip


@given(values=LAYOUTS, world_size=st.integers(1, 48))
@settings(max_examples=200, deadline=None)
def test_layouts_are_accepted_exactly_when_megatron_can_build_them(values: dict[str, int], world_size: int) -> None:
    tp, pp, ep, etp = (values[f"layout.{name}"] for name in ("tp", "pp", "ep", "etp"))
    prompts = values["algorithm.prompts_per_step"]
    dense_fits = world_size % (tp * pp) == 0
    experts_fit = world_size % (etp * ep * pp) == 0
    buildable = dense_fits and experts_fit and prompts % (world_size // (tp * pp)) == 0
    assert (problems_of(with_values(TINY, values), world_size) == []) == buildable


@given(values=LAYOUTS, world_size=st.integers(1, 48))
@settings(max_examples=200, deadline=None)
def test_world_sizes_that_are_advised_solve_the_problem(values: dict[str, int], world_size: int) -> None:
    config = with_values(TINY, values)
    for problem in problems_of(config, world_size):
        gone = ("the world size", "layout.") if problem.where.startswith("layout.") else ("the world size",)
        for number in advised(r"start ([\d or]+) processes", problem.fix):
            assert not any(left.where.startswith(gone) for left in problems_of(config, number))


def advised(pattern: str, fix: str) -> list[int]:
    return [int(number) for numbers in re.findall(pattern, fix) for number in numbers.split(" or ")]


@pytest.mark.parametrize(
    ("values", "world_size", "field"),
    [
        ({"layout.tp": 2, "layout.pp": 2}, 6, "the world size 6"),
        ({"layout.tp": 2, "layout.pp": 2}, 2, "the world size 2"),
        ({"layout.ep": 4}, 2, "layout.ep"),
        ({"layout.ep": 2, "layout.etp": 2, "layout.tp": 2}, 2, "layout.ep"),
        ({"layout.ep": 2, "layout.pp": 2}, 2, "layout.ep"),
        ({}, 3, "algorithm.prompts_per_step"),
        ({"rollout.engine": "sglang", "rollout.sglang.tp": 3}, 4, "rollout.sglang.tp"),
    ],
)  # fmt: skip
def test_a_layout_that_does_not_fit_is_named(values: dict[str, object], world_size: int, field: str) -> None:
    (problem,) = problems_of(with_values(TINY, values), world_size)
    assert problem.field == field


@pytest.mark.parametrize(
    ("values", "fits"),
    [
        ({"layout.tp": 2, "layout.etp": 2}, True),
        ({"layout.ep": 2}, True),
        ({"layout.tp": 2, "layout.etp": 2, "layout.ep": 2}, False),
        ({"layout.etp": 2}, False),
    ],
)
def test_gloo_cannot_gather_unequal_numbers_of_tokens(values: dict[str, object], fits: bool) -> None:
    config = with_values(TINY, {"layout.ep": 1} | values)
    check_backend(config.layout, "nccl")
    if fits:
        check_backend(config.layout, "gloo")
    else:
        with pytest.raises(ConfigError, match="NCCL") as refused:
            check_backend(config.layout, "gloo")
        assert refused.value.field == "layout.etp"


def test_experts_may_be_spread_over_tensor_parallel_ranks() -> None:
    assert problems_of(with_values(TINY, {"layout.tp": 2, "layout.sp": True, "layout.ep": 2}), 2) == []


@pytest.mark.parametrize(("prompts", "numbers"), [(32, [30, 33]), (2, [3])])
def test_numbers_of_prompts_that_are_advised_solve_the_problem(prompts: int, numbers: list[int]) -> None:
    config = with_values(TINY, {"algorithm.prompts_per_step": prompts})
    (problem,) = problems_of(config, 3)
    assert advised(r"choose ([\d or]+)", problem.fix) == numbers
    for number in numbers:
        assert problems_of(with_values(config, {"algorithm.prompts_per_step": number}), 3) == []
