"""Means, curves and the panel that shows them: bounded and of the right width, whatever the numbers are."""

from __future__ import annotations

import io
import math

from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console as Printer

from grpo_mega.observe.waiting import clock
from grpo_mega.show.console.columns import PANEL, column, mean
from grpo_mega.show.console.panel import (
    BARS,
    MOST_VALUES,
    Snapshot,
    Sparkline,
    draw_panel,
    extend_curves,
    sparkline,
)

NUMBERS = st.floats() | st.integers(-(2**40), 2**40).map(float)


@given(st.lists(NUMBERS, min_size=1))
@example([1e308, 1e308])
@example([math.inf, -math.inf])
@example([math.inf])
def test_a_mean_is_between_its_values_or_not_finite_if_one_of_them_is_not(values: list[float]) -> None:
    found = mean(values)
    if all(map(math.isfinite, values)):
        slack = max(1e-300, 1e-12 * max(map(abs, values)))
        assert min(values) - slack <= found <= max(values) + slack
    else:
        assert not math.isfinite(found)


@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from(PANEL), NUMBERS, min_size=1), NUMBERS, st.integers(12, 200), st.booleans())
@example(dict.fromkeys(PANEL, 1e308), 1e308, 80, False)
@example({"reward/mean": 2.2e-309}, 5e-324, 80, False)
def test_a_panel_is_as_wide_as_the_terminal_whatever_it_shows(
    values: dict[str, float], seconds: float, width: int, plain: bool
) -> None:
    curves: dict[str, Sparkline] = {}
    for value in (values, dict.fromkeys(values, 0.0), {name: -value for name, value in values.items()}):
        extend_curves(curves, value)
    at = Snapshot(
        "tiny", "", 3, 10, clock(seconds), "", "generate", phase_seconds=seconds, phase_share=seconds,
        phase_left=seconds,
    )  # fmt: skip
    printed = Printer(file=io.StringIO(), width=width, legacy_windows=False, _environ={})
    with printed.capture() as captured:
        printed.print(draw_panel(at, curves, ["mismatch since step 2"], width, plain=plain))
    assert max(map(len, captured.get().splitlines())) <= width


@given(st.lists(NUMBERS, max_size=300), st.integers(-1, 40))
@example([0.0, 2.2e-309], 2)
@example([5e-324, 0.0], 2)
@example([1e308, -1e308], 2)
@example([1e308, 1e308], 1)
@example([math.inf, -math.inf], 1)
def test_a_sparkline_is_as_long_as_there_is_room_for_and_rises_with_its_values(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == max(0, min(width, len(values)))
    assert set(line) <= {*BARS, " "}
    finite = [value for value in values if math.isfinite(value)]
    if len(values) <= width and finite and len(finite) == len(values):
        assert line[values.index(min(values))] == BARS[0]
        if max(values) > min(values):
            assert line[values.index(max(values))] == BARS[-1]


@given(st.lists(NUMBERS, min_size=1, max_size=3 * MOST_VALUES))
@example([1e308] * (MOST_VALUES + 1))
@example([math.inf, -math.inf] * MOST_VALUES)
def test_what_a_curve_keeps_is_bounded_and_spans_the_run(values: list[float]) -> None:
    curve = Sparkline(column("reward/mean"))
    for value in values:
        curve.add(value)
    assert column("reward/mean").text({"reward/mean": values[-1]}) in curve.draw(36, plain=True).plain
    assert len(curve.sparkline(10**6)) <= MOST_VALUES
    rising = Sparkline(column("reward/mean"))
    for number in range(len(values)):
        rising.add(number)
    line = rising.sparkline(len(BARS))
    assert list(line) == sorted(line)
