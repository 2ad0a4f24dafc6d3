"""Phase timer: seconds add up by phase, for the step and for the run."""

from __future__ import annotations

import pytest

from grpo_mega.observe.timer import PhaseTimer


def busy() -> int:
    return sum(range(20_000))


def test_a_step_is_reset_and_the_run_keeps_adding_up() -> None:
    timer = PhaseTimer()
    with timer("generate"):
        busy()
    with timer("update"):
        busy()
    with timer("generate"):
        busy()
    first = timer.step_seconds()
    assert list(first) == ["generate", "update"]
    assert timer.step_seconds() == {}
    assert timer.totals() == first

    with timer("generate"):
        busy()
    second = timer.step_seconds()
    totals = timer.totals()
    assert list(second) == ["generate"]
    assert totals["generate"].wall == first["generate"].wall + second["generate"].wall
    assert totals["generate"].cpu == first["generate"].cpu + second["generate"].cpu
    assert totals["update"] == first["update"]
    assert all(seconds.wall > 0 and seconds.cpu > 0 for seconds in totals.values())


def test_a_phase_that_fails_is_counted_and_ended() -> None:
    timer = PhaseTimer()
    with pytest.raises(RuntimeError, match="engine"), timer("generate"):
        raise RuntimeError("engine")
    with timer("update"):
        busy()
    assert list(timer.step_seconds()) == ["generate", "update"]


def test_phases_do_not_nest() -> None:
    timer = PhaseTimer()
    with pytest.raises(ValueError, match="'update' starts inside phase 'generate'"), timer("generate"), timer("update"):
        busy()
    assert list(timer.totals()) == ["generate"]


def test_the_clock_of_a_phase_stands_still_while_another_interrupts_it() -> None:
    seen: list[str] = []
    timer = PhaseTimer(seen.append)
    with timer("generate"):
        with timer.instead("reward"):
            busy()
        inside = timer.totals()
        busy()
    totals = timer.totals()
    assert seen == ["generate", "reward", "generate"]
    assert totals["reward"] == inside["reward"]
    assert totals["generate"].wall > inside["generate"].wall
    with pytest.raises(ValueError, match="'reward' interrupts no other phase"), timer.instead("reward"):
        busy()
