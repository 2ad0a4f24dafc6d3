"""Seconds and speed of a step."""

from __future__ import annotations

import pytest

from grpo_mega.observe.machine import step_seconds, throughput
from grpo_mega.observe.timer import Seconds


def walls(**seconds: float) -> dict[str, Seconds]:
    return {phase: Seconds(wall, 100.0) for phase, wall in seconds.items()}


def test_a_step_is_the_wall_seconds_of_its_phases_without_what_is_apart() -> None:
    found = step_seconds(walls(checkpoint=8.0, generate=1.0, reward=0.5, update=2.5, evaluate=16.0, export=32.0))
    assert found["time/step"] == 4.0
    assert found["time/export"] == 32.0
    assert step_seconds({}) == {"time/step": 0.0}


def test_speed_is_of_the_whole_step() -> None:
    assert throughput(200, step_seconds(walls(generate=1.0, update=3.0, evaluate=4.0))) == {
        "machine/tokens_per_second": pytest.approx(50.0)
    }


@pytest.mark.parametrize("spent", [walls(update=3.0), walls(), walls(evaluate=1.0)])
def test_a_step_that_sampled_before_a_stop_has_no_speed(spent: dict[str, Seconds]) -> None:
    """Its tokens over the seconds since the start would be too fast."""
    assert throughput(200, step_seconds(spent)) == {}


def test_what_samples_nothing_has_no_speed() -> None:
    assert throughput(None, step_seconds(walls(sft=2.0))) == {}
