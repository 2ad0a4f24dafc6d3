"""Which groups of a step are shown, and what is found for their samples."""

from __future__ import annotations

from collections import Counter

import pytest
from composed import composed

from grpo_mega.stages.shown import chosen_groups, sample_numbers
from grpo_mega.types import Answer, Group, Prompt, Score


def groups(*rewards: tuple[float | None, ...]) -> list[Group]:
    scores = [[Score(0.0, {}, unscorable="away") if r is None else Score(r, {}) for r in own] for own in rewards]
    return [
        Group(Prompt(f"p{i}", (1,), "", "", ""), tuple(Answer(1, "stop", ((0, 0),), score) for score in own))
        for i, own in enumerate(scores)
    ]


def chosen(of: list[Group], count: int, step: int, seed: int = 0) -> list[int]:
    config = composed("experiment=tiny")
    config.run.sample_groups_per_step, config.run.seed = count, seed
    return chosen_groups(of, config, step)


def test_every_group_with_signal_is_drawn_now_and_then_and_none_without() -> None:
    of = groups((0.0, 1.0), (1.0, 1.0), (0.0, 1.0), (0.0, 0.0), (None, 1.0), (0.5, 1.0))
    drawn = Counter(group for step in range(60) for group in chosen(of, 1, step))
    assert {*drawn} == {0, 2, 5}
    assert min(drawn.values()) > 5


def test_those_without_signal_fill_what_is_left() -> None:
    of = groups((1.0, 1.0), (0.0, 1.0), (0.0, 0.0), (0.0, 0.0))
    for step in range(20):
        assert chosen(of, 1, step) == [1]
        assert 1 in chosen(of, 3, step)
        assert len({*chosen(of, 3, step)}) == 3
    assert len({tuple(chosen(of, 2, step)) for step in range(20)}) == 3


def test_a_step_that_runs_again_draws_the_same_and_another_seed_does_not() -> None:
    of = groups(*[(0.0, 1.0)] * 50)
    draws = [[chosen(of, 3, step, seed) for step in range(10)] for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    assert all(own == sorted({*own}) for own in draws[0])


@pytest.mark.parametrize(("count", "expected"), [(0, 0), (2, 2), (9, 2)])
def test_there_are_no_more_than_there_are(count: int, expected: int) -> None:
    assert len(chosen(groups((0.0, 1.0), (1.0, 1.0)), count, 1)) == expected
    assert chosen([], count, 1) == []


def test_samples_are_numbered_group_after_group_whatever_their_sizes() -> None:
    of = groups((0.0,), (1.0, 1.0, 1.0), (0.0, 0.0))
    assert sample_numbers(of, [1, 2]) == [range(1, 4), range(4, 6)]
    assert sample_numbers(of, [0]) == [range(0, 1)]
