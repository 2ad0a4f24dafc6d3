"""Seconds add up by phase, for the step and for the run; speed and the slowest rank of a step."""

from __future__ import annotations

import pytest

from grpo_mega.observe.timer import PhaseTimer, Seconds, Use, step_seconds, throughput, use_of_ranks, working_seconds


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


def test_a_rank_works_while_it_does_not_wait_for_others() -> None:
    spent = {"generate": Seconds(5.0, 9.0, 1.0), "update": Seconds(3.0, 9.0, 0.5), "checkpoint": Seconds(9.0, 9.0, 0.0)}
    assert working_seconds(spent) == 6.5


def test_speed_of_learning_is_a_mean_over_ranks_and_the_phase_in_which_they_learn() -> None:
    uses = [Use(2 * 10**9, 3e12, 1.0), Use(4 * 10**9, 5e12, 1.0)]
    found = use_of_ranks(uses, {"time/generate": 7.0, "time/update": 2.0, "time/reward_model": 9.0}, peak_tflops=10.0)
    assert found["machine/tflops"] == pytest.approx(2.0)
    assert found["machine/mfu"] == pytest.approx(0.2)
    assert found["machine/peak_memory_gb"] == 4.0
    assert "machine/mfu" not in use_of_ranks(uses, {"time/sft": 2.0}, peak_tflops=None)
    idle = [Use(10**9, 0.0, 1.0)]
    assert use_of_ranks(idle, {"time/update": 2.0}, 10.0) == {"machine/peak_memory_gb": 1.0}
    assert use_of_ranks(uses[:1], {"time/generate": 2.0}, 10.0) == {"machine/peak_memory_gb": 2.0}


@pytest.mark.parametrize(
    ("working", "straggling", "slowest"),
    [([2.0, 2.0], 1.0, 0), ([2.0, 3.0], 1.5, 1), ([2.0, 2.2, 6.6, 1.0, 2.0], 3.3, 2), ([4.0, 1.0, 1.0, 4.0], 4.0, 0)],
)
def test_the_slowest_rank_is_compared_with_the_median(working: list[float], straggling: float, slowest: int) -> None:
    found = use_of_ranks([Use(0, 0.0, seconds) for seconds in working], {}, None)
    assert found["machine/straggling"] == pytest.approx(straggling)
    assert found["machine/slowest_rank"] == slowest
