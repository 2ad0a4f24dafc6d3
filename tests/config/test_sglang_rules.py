"""Rules about SGLang engines."""

from __future__ import annotations

import re

import pytest
from composed import composed
from ruled import TINY, problems_of, with_values

from grpo_mega.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"rollout.sglang.tp": 2}, "rollout.sglang.tp"),
        ({"rollout.sglang.arguments": {"a": 1}}, "rollout.sglang.arguments"),
        ({"rollout.engine": "sglang", "rollout.sglang.arguments": {"tp_size": 2}}, "rollout.sglang.arguments.tp_size"),
        (
            {"rollout.engine": "sglang", "rollout.sglang.transport": "network"}
            | {"rollout.sglang.arguments": {"speculative_algorithm": "EAGLE"}},
            "rollout.sglang.arguments.speculative_algorithm",
        ),
        ({"rollout.engine": "sglang", "rollout.sglang.arguments": {"pp_size": 2}}, "rollout.sglang.arguments.pp_size"),
        (
            {"rollout.engine": "sglang", "rollout.sglang.arguments": {"context_length": 16}},
            "rollout.sglang.arguments.context_length",
        ),
        ({"rollout.engine": "sglang", "rollout.sglang.fp8": True}, "rollout.sglang.fp8"),
        (
            {"rollout.engine": "sglang", "rollout.sglang.first_gpu": 4},
            "rollout.sglang.first_gpu",
        ),
        (
            {"rollout.engine": "sglang", "rollout.sglang.tp": 2, "rollout.sglang.arguments": {"ep_size": 4}},
            "rollout.sglang.arguments.ep_size",
        ),
        (
            {"rollout.engine": "sglang", "rollout.sglang.arguments": {"moe_a2a_backend": "deepep"}},
            "rollout.sglang.arguments.moe_a2a_backend",
        ),
        (
            {"rollout.engine": "sglang", "rollout.sglang.tp": 2}
            | {"rollout.sglang.arguments": {"enable_dp_attention": True, "dp_size": 4}},
            "rollout.sglang.arguments.dp_size",
        ),
        (
            {"rollout.engine": "sglang", "rollout.sglang.tp": 2, "rollout.sglang.arguments": {"attn_dp_size": 0}},
            "rollout.sglang.arguments.attn_dp_size",
        ),
        (
            {"rollout.engine": "sglang", "rollout.sglang.tp": 2}
            | {"rollout.sglang.arguments": {"enable_dp_attention": True, "attn_dp_size": 2}},
            "rollout.sglang.arguments.attn_dp_size",
        ),
        (
            {"rollout.engine": "sglang", "rollout.sglang.tp": 2, "rollout.sglang.arguments": {"dp_size": 2}},
            "rollout.sglang.arguments.dp_size",
        ),
        (
            {"rollout.engine": "sglang", "rollout.sglang.fp8": True, "model.dtype": "bf16", "model.moe.ffn_hidden": 128}
            | {"model.ffn_hidden": 128, "model.moe.shared_ffn_hidden": 256, "rollout.sglang.tp": 2}
            | {"rollout.sglang.arguments": {"moe_dense_tp_size": 1}},
            "rollout.sglang.fp8",
        ),
        (
            {"rollout.engine": "sglang", "rollout.slice_tokens": 8, "algorithm.correction": "truncate"}
            | {"rollout.sglang.arguments": {"page_size": 16}},
            "rollout.slice_tokens",
        ),
        (
            {"rollout.sglang.timeouts.engine_loading": 1.0},
            "rollout.sglang.timeouts.engine_loading",
        ),
        (
            {"rollout.engine": "sglang", "rollout.sglang.timeouts.engine_releasing": 300.0},
            "rollout.sglang.timeouts.engine_releasing",
        ),
    ],
)
def test_settings_of_sglang_are_neither_idle_nor_twice(values: dict[str, object], field: str) -> None:
    (problem,) = problems_of(with_values(TINY, values))
    assert problem.field == field


def test_settings_of_the_embedded_engine_are_no_rules_for_sglang() -> None:
    too_few = {"rollout.concurrent_sequences": 7}
    (problem,) = problems_of(with_values(TINY, too_few))
    assert problem.field == "algorithm.group_size"
    large = {"rollout.engine": "sglang", "algorithm.group_size": 513}
    assert problems_of(with_values(TINY, large)) == []
    assert problems_of(with_values(TINY, {"rollout.engine": "sglang"} | too_few)) == []  # for the base model's gate
    (problem,) = problems_of(with_values(TINY, {"rollout.engine": "sglang", "base.train": False} | too_few))
    assert problem.field == "rollout.concurrent_sequences"


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"suspend_process_groups": False}, "rollout.sglang.suspend_process_groups"),
        ({"timeouts.engine_loading": 300.0}, "rollout.sglang.timeouts.engine_loading"),
    ],
)
def test_on_gpus_of_their_own_nobody_makes_room(values: dict[str, object], field: str) -> None:
    apart = {"rollout.engine": "sglang", "rollout.sglang.first_gpu": 4, "rollout.sglang.transport": "network"}
    values = {f"rollout.sglang.{name}": value for name, value in values.items()}
    (problem,) = problems_of(with_values(TINY, apart | values))
    assert problem.field == field
    assert problems_of(with_values(TINY, apart | {"rollout.sglang.answer_seconds": 700.0})) == []


def test_server_arguments_of_ones_own_are_accepted() -> None:
    arguments = {"rollout.engine": "sglang", "rollout.sglang.arguments": {"mem_fraction_static": 0.6}}
    assert problems_of(with_values(TINY, arguments)) == []


def test_what_has_no_effect_is_undone_by_the_overrides_that_are_advised() -> None:
    """An experiment's file may have set it, so there may be nothing that the user could leave out."""
    own = [
        "rollout.sglang.timeouts.engine_loading=3",
        "+rollout.sglang.arguments.log_level=info",
        "rollout.sglang.transport=disk",
    ]
    command = ["experiment=tiny_sglang", *own, "rollout.engine=embedded"]
    with pytest.raises(ConfigError) as refused:
        composed(*command)
    undone = re.findall(r"give (.*?), or set rollout.engine=sglang", str(refused.value))
    assert len(undone) == 3
    assert composed(*command, *" ".join(undone).split()).rollout.engine == "embedded"
