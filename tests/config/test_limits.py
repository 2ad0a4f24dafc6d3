"""Every number of the schema has an interval beside it, every choice a list, and both are enforced."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import fields, is_dataclass
from operator import attrgetter
from types import NoneType
from typing import Any, get_args, get_type_hints

import pytest
import torch
from composed import composed

from grpo_kernels import LossOptions, fused_logprob
from grpo_mega.algorithm.advantage import BASELINES, STDS
from grpo_mega.algorithm.weights import token_weights
from grpo_mega.config.limits import (
    Interval,
    OneOf,
    With,
    default_of,
    idle_problems,
    limit_problems,
    limits_of,
    needs_of,
)
from grpo_mega.config.schema import Config

LIMITS = limits_of(Config)
BOUNDED = [(name, limit.text) for name, limit in LIMITS.items() if isinstance(limit, Interval)]
CHOICES = {name: limit.choices for name, limit in LIMITS.items() if isinstance(limit, OneOf)}


@pytest.fixture(scope="module")
def tiny() -> Config:
    return composed("experiment=tiny")


def leaf_types(node: type, prefix: str = "") -> dict[str, set[Any]]:
    hints = get_type_hints(node)
    leaves: dict[str, set[Any]] = {}
    for field in fields(node):
        kind = hints[field.name]
        if is_dataclass(kind):
            leaves |= leaf_types(kind, f"{prefix}{field.name}.")
        else:
            leaves[prefix + field.name] = set(get_args(kind) or (kind,)) - {NoneType}
    return leaves


def changed(config: Config, name: str, value: object) -> Config:
    config = deepcopy(config)
    *path, leaf = name.split(".")
    setattr(attrgetter(".".join(path))(config), leaf, value)
    return config


def test_every_number_of_the_schema_has_exactly_one_interval() -> None:
    numbers = [name for name, kinds in leaf_types(Config).items() if kinds <= {int, float}]
    assert sorted(name for name, _ in BOUNDED) == sorted(numbers)


def test_choices_are_of_words() -> None:
    leaves = leaf_types(Config)
    assert all(leaves[name] == {str} for name in CHOICES)


def test_one_room_can_be_looked_at_alone(tiny: Config) -> None:
    wrong = changed(changed(changed(tiny, "data.task", "x"), "data.min_terms", 1), "run.seed", -1)
    assert {problem.field for problem in limit_problems(wrong, "data.")} == {"data.min_terms", "data.task"}


def test_the_tiny_run_is_inside_every_bound(tiny: Config) -> None:
    assert list(limit_problems(tiny)) == []


@pytest.mark.parametrize(("name", "interval"), BOUNDED)
def test_a_number_outside_its_interval_is_named(tiny: Config, name: str, interval: str) -> None:
    low, high = (float(bound) for bound in interval[1:-1].split(","))
    outside = [low - 1, math.nan, -math.inf]
    outside += [high + 1] if high < math.inf else []
    outside += [low] if interval[0] == "(" else []
    outside += [high] if interval[-1] == ")" else []
    for value in outside:
        (problem,) = limit_problems(changed(tiny, name, value))
        assert problem.where == f"{name}={value}"
        assert interval in problem.fix


@pytest.mark.parametrize(("name", "interval"), BOUNDED)
def test_closed_ends_are_inside(tiny: Config, name: str, interval: str) -> None:
    low, high = (float(bound) for bound in interval[1:-1].split(","))
    inside = [max(low, -1.0) + 0.5] + [low] * (interval[0] == "[") + [high] * (interval[-1] == "]")
    for value in inside:
        assert list(limit_problems(changed(tiny, name, value))) == []


@pytest.mark.parametrize("name", CHOICES)
def test_an_unknown_choice_is_named_with_what_is_allowed(tiny: Config, name: str) -> None:
    (problem,) = limit_problems(changed(tiny, name, "nonsense"))
    assert problem.where == f"{name}=nonsense"
    assert all(choice in problem.fix for choice in CHOICES[name])


@pytest.mark.parametrize("name", CHOICES)
def test_every_choice_is_accepted_and_a_near_miss_is_suggested(tiny: Config, name: str) -> None:
    for choice in CHOICES[name]:
        assert list(limit_problems(changed(tiny, name, choice))) == []
    (problem,) = limit_problems(changed(tiny, name, CHOICES[name][-1] + "x"))
    assert problem.fix.endswith(f"did you mean {CHOICES[name][-1]}?")


@pytest.mark.parametrize(("name", "needs"), needs_of(Config).items())
def test_a_setting_without_effect_is_named_with_its_default_and_what_gives_it_an_effect(
    tiny: Config, name: str, needs: list[With]
) -> None:
    default = default_of(Config, name)
    met = changed(tiny, name, {"x": 1} if default == {} else "x")
    for need in needs:
        met = changed(met, need.other, need.values.choices[-1] if isinstance(need.values, OneOf) else 1)
    assert name not in {problem.field for problem in idle_problems(met)}
    for need in needs:
        idle = changed(met, need.other, "" if isinstance(need.values, OneOf) else 0)
        (problem,) = (problem for problem in idle_problems(idle) if problem.field == name)
        assert need.other in problem.what
        assert need.other in problem.fix
        given = [word.partition("=") for word in problem.fix.split() if word.startswith(f"{need.other}=")]
        assert [value in need.values for _, _, value in given] == [True] * isinstance(need.values, OneOf)
        # Its remedy names the lower end alone.
        assert not isinstance(need.values, Interval) or need.values.text.endswith(", inf)")
        assert "inf)" not in problem.fix
        assert name not in {problem.field for problem in idle_problems(changed(idle, name, default))}


def test_the_kernels_accept_exactly_the_temperatures_of_a_configuration() -> None:
    low, high = (float(bound) for bound in dict(BOUNDED)["rollout.temperature"].strip("[]").split(","))
    logits, targets = torch.zeros(1, 4), torch.zeros(1, dtype=torch.long)
    for temperature in (low, high):
        fused_logprob(logits, targets, temperature=temperature)
    for temperature in (low / 2, high * 2):
        with pytest.raises(ValueError, match="temperature"):
            fused_logprob(logits, targets, temperature=temperature)


def test_the_algorithm_takes_exactly_the_choices_of_a_configuration() -> None:
    mask, cu_seqlens = torch.ones(2, dtype=torch.bool), torch.tensor([0, 2])
    assert (*BASELINES, "batch", "critic") == CHOICES["algorithm.advantage_baseline"]
    assert {*STDS, "batch", "batch_rewards"} == {*CHOICES["algorithm.advantage_std"]}
    for aggregation in CHOICES["algorithm.aggregation"]:
        token_weights(mask, cu_seqlens, aggregation, 1)
    with pytest.raises(ValueError, match=", ".join(CHOICES["algorithm.aggregation"][:-1])):
        token_weights(mask, cu_seqlens, "nonsense", 1)


def test_dual_clipping_may_be_off(tiny: Config) -> None:
    assert list(limit_problems(changed(tiny, "algorithm.dual_clip", None))) == []


@pytest.mark.parametrize("bounds", [(10.0, 10.0), (1.0, 4.0), (math.inf, math.inf), (3e-4, 4e-4)])
def test_wide_and_absent_clip_bounds_can_be_written_and_are_what_the_kernels_take(
    tiny: Config, bounds: tuple[float, float]
) -> None:
    low, high = ("inf" if bound == math.inf else str(bound) for bound in bounds)
    overrides = [f"algorithm.clip_low={low}", f"algorithm.clip_high={high}"]
    algorithm = composed("experiment=tiny", *overrides).algorithm
    options = LossOptions(clip_low=algorithm.clip_low, clip_high=algorithm.clip_high)
    assert (options.clip_low, options.clip_high) == bounds


def test_the_kernels_and_the_bounds_refuse_the_same(tiny: Config) -> None:
    for name, value in (
        ("clip_low", -0.1),
        ("clip_high", -0.1),
        ("kl_coef", -0.1),
        ("correction_cap", 0.5),
        ("correction_floor", 1.5),
        ("tau_pos", 0.0),
        ("tau_neg", -1.0),
        ("vespo_k_pos", 0.0),
        ("vespo_lambda_neg", -1.0),
        ("off_policy_mask", -0.1),
    ):
        assert list(limit_problems(changed(tiny, f"algorithm.{name}", value)))
        with pytest.raises(ValueError, match=f"^{name} is {value}; use a"):
            LossOptions(correction="mask", **{name: value})
