"""Every number of the schema has an interval, every choice a list, and both are enforced."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import fields, is_dataclass
from operator import attrgetter
from types import NoneType
from typing import Any, get_args, get_type_hints

import pytest

from grpo_mega.config.bounds import CHOICES, RANGES, REASONS, field_problems
from grpo_mega.config.load import compose_config
from grpo_mega.config.schema import Config

BOUNDED = [(name, interval) for interval, names in RANGES.items() for name in names]


@pytest.fixture(scope="module")
def tiny() -> Config:
    return compose_config(["experiment=tiny"])


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


def test_choices_and_reasons_are_about_fields_of_the_schema() -> None:
    leaves = leaf_types(Config)
    assert all(leaves[name] == {str} for name in CHOICES)
    assert set(REASONS) <= set(leaves)


def test_the_tiny_run_is_inside_every_bound(tiny: Config) -> None:
    assert list(field_problems(tiny)) == []


@pytest.mark.parametrize(("name", "interval"), BOUNDED)
def test_a_number_outside_its_interval_is_named(tiny: Config, name: str, interval: str) -> None:
    low, high = (float(bound) for bound in interval[1:-1].split(","))
    outside = [low - 1, math.nan, -math.inf]
    outside += [high + 1] if high < math.inf else []
    outside += [low] if interval[0] == "(" else []
    outside += [high] if interval[-1] == ")" else []
    for value in outside:
        (problem,) = field_problems(changed(tiny, name, value))
        assert problem.startswith(f"{name}={value}:")
        assert interval in problem


@pytest.mark.parametrize(("name", "interval"), BOUNDED)
def test_closed_ends_are_inside(tiny: Config, name: str, interval: str) -> None:
    low, high = (float(bound) for bound in interval[1:-1].split(","))
    inside = [low + 0.5] + [low] * (interval[0] == "[") + [high] * (interval[-1] == "]")
    for value in inside:
        assert list(field_problems(changed(tiny, name, value))) == []


@pytest.mark.parametrize("name", CHOICES)
def test_an_unknown_choice_is_named_with_what_is_allowed(tiny: Config, name: str) -> None:
    (problem,) = field_problems(changed(tiny, name, "nonsense"))
    assert problem.startswith(f"{name}=nonsense:")
    assert all(choice in problem for choice in CHOICES[name])


@pytest.mark.parametrize("name", CHOICES)
def test_every_choice_is_accepted_and_a_near_miss_is_suggested(tiny: Config, name: str) -> None:
    for choice in CHOICES[name]:
        assert list(field_problems(changed(tiny, name, choice))) == []
    (problem,) = field_problems(changed(tiny, name, CHOICES[name][-1] + "x"))
    assert problem.endswith(f"did you mean {CHOICES[name][-1]}?")


def test_dual_clipping_may_be_off(tiny: Config) -> None:
    assert list(field_problems(changed(tiny, "algorithm.dual_clip", None))) == []
