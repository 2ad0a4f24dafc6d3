"""The learning rate is bounded, rises and falls once, has no jumps, and a stop or more steps change none of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.config.rules.optimizer import schedule_problems
from grpo_mega.config.schema import OptimizerConfig, SFTConfig
from grpo_mega.models.learning_rate import LearningRate, scheduled


@st.composite
def accepted(draw: st.DrawFn) -> tuple[OptimizerConfig, int, int]:
    """A schedule that the rules accept, steps, and updates in each."""
    steps, updates = draw(st.integers(2, 60)), draw(st.integers(1, 4))
    shape = draw(st.sampled_from(["constant", "linear", "cosine", "wsd"]))
    config = OptimizerConfig(lr=draw(st.floats(1e-8, 1.0)), schedule=shape)
    if shape == "constant":
        config.warmup_steps = draw(st.integers(0, 300))
    else:
        warm = draw(st.integers(0, steps - 2))
        config.warmup_steps = draw(st.integers(max(0, (warm - 1) * updates + 1), warm * updates))
        config.lr_floor = draw(st.just(0.0) | st.floats(1e-6, 1))
        config.decay_steps = draw(st.integers(2, steps - warm))
        if shape != "wsd" and not config.lr_floor:
            config.decay_steps = steps - warm
        if shape != "wsd" and draw(st.booleans()):
            config.decay_steps = None
    assert not [*schedule_problems(config, "optimizer", steps, "run.steps", updates)]
    return config, steps, updates


def course(config: OptimizerConfig, steps: int, updates: int) -> list[float]:
    """The rate of every update when all steps have signal."""
    rate = scheduled(config, steps, updates)
    return [rate.at(step * updates + i, step) for step in range(steps) for i in range(updates)]


@given(accepted())
def test_it_rises_to_its_peak_and_falls_to_its_floor(chosen: tuple[OptimizerConfig, int, int]) -> None:
    config, steps, updates = chosen
    rates, warm = course(config, steps, updates), config.warmup_steps
    assert all(0 < rate <= config.lr for rate in rates)
    assert rates[:warm] == [config.lr * ((i + 1) / warm) for i in range(min(warm, len(rates)))]
    after = rates[max(0, warm - 1) :]
    assert all(later <= earlier for earlier, later in pairwise(after))
    assert all(rate >= config.lr * config.lr_floor for rate in after)
    if config.schedule != "constant":
        assert after[0] == config.lr
        assert scheduled(config, steps, updates).at(10**6, 10**6) == config.lr * config.lr_floor


@given(accepted())
def test_no_step_falls_further_than_the_steepest_part_of_its_shape(chosen: tuple[OptimizerConfig, int, int]) -> None:
    """The seams included: from the peak to the decay, and from the decay to the floor."""
    config, steps, updates = chosen
    rate = scheduled(config, steps, updates)
    shares = [rate.share(step) for step in range(steps + 2)]
    steepest = 1.571 if config.schedule == "cosine" else 1.0  # pi / 2
    allowed = steepest * (1 - config.lr_floor) / max(1, rate.decay) + 1e-12
    assert all(0 <= earlier - later <= allowed for earlier, later in pairwise(shares))


@given(accepted())
def test_wsd_ends_with_the_run_and_the_others_begin_after_warm_up(chosen: tuple[OptimizerConfig, int, int]) -> None:
    config, steps, updates = chosen
    rate = scheduled(config, steps, updates)
    if config.schedule == "wsd" or config.decay_steps is None:
        assert rate.shape == "constant" or rate.begins + rate.decay == steps
    else:
        assert (rate.begins - 1) * updates < config.warmup_steps <= rate.begins * updates


@given(accepted(), st.integers(1, 100))
def test_more_steps_change_no_rate_from_before_the_decay(chosen: tuple[OptimizerConfig, int, int], more: int) -> None:
    """And none at all when the decay does not end with the run."""
    config, steps, updates = chosen
    before, after = scheduled(config, steps, updates), scheduled(config, steps + more, updates)
    moves = config.schedule == "wsd" or (config.schedule != "constant" and config.decay_steps is None)
    for step in range(before.begins if moves else steps):
        assert after.at(step * updates, step) == before.at(step * updates, step)


def test_a_step_without_signal_brings_the_end_nearer_and_not_the_end_of_warm_up() -> None:
    rate = scheduled(OptimizerConfig(lr=1.0, warmup_steps=4, schedule="wsd", decay_steps=2), 10)
    assert [rate.at(update=1, step=step) for step in (1, 8, 9)] == [0.5, 0.5, 0.25]
    assert [rate.at(update=5, step=step) for step in (5, 8, 9)] == [1.0, 1.0, 0.5]


def test_cosine_is_half_way_in_the_middle_and_flat_at_both_ends() -> None:
    rate = LearningRate(2.0, 0, "cosine", begins=10, decay=100, floor=0.2)
    assert rate.share(60) == pytest.approx(0.6)
    assert rate.share(11) > 0.999
    assert rate.share(109) < 0.201
    assert rate.at(0, 110) == 0.4


def test_supervised_steps_have_the_same_schedules() -> None:
    config = SFTConfig(lr=1.0, warmup_steps=2, schedule="linear", lr_floor=0.5)
    rate = scheduled(config, steps=6)
    assert [rate.at(step, step) for step in range(6)] == [0.5, 1.0, 1.0, 0.875, 0.75, 0.625]
    assert scheduled(replace(config, schedule="wsd", decay_steps=2), steps=6).at(5, 5) == 0.75
