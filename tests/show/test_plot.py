"""curves.png: a valid picture of what the metrics say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from grpo_mega.show.plot import OF_PAIRS, OF_POLICIES, OF_STEPS, panels_of, plot_curves, series, smooth


def line(step: int) -> dict[str, Any]:
    rise = 1 - math.exp(-step / 30)
    metrics = {"reward/mean": 1.2 * rise, "reward/accuracy": rise, "reward/format": rise}
    return {"step": step, **metrics, "rollout/length_mean": 15 + 10 * rise}


def picture(path: Path) -> tuple[tuple[int, int], int]:
    """Size in pixels, and how many pixels are not white."""
    with Image.open(path) as image:
        image.load()
        assert image.format == "PNG"
        return image.size, sum(image.convert("L").histogram()[:250])


def test_curves_leave_more_ink_than_empty_axes(tmp_path: Path) -> None:
    metrics = [line(step) for step in range(1, 101)]
    for step in (20, 60, 100):
        metrics[step - 1]["eval/accuracy"] = 0.5
    plot_curves(metrics, tmp_path / "curves.png", "tiny, seed 0")
    plot_curves([], tmp_path / "empty.png", "tiny, seed 0")
    size, ink = picture(tmp_path / "curves.png")
    assert size == (1800, 540)
    assert ink > picture(tmp_path / "empty.png")[1] + 5_000
    assert {file.name for file in tmp_path.iterdir()} == {"curves.png", "empty.png"}


def test_held_out_results_are_in_the_picture(tmp_path: Path) -> None:
    steps = [line(step) for step in range(1, 101)]
    held_out = [{"step": step, "eval/heldout/accuracy": 0.5} for step in (0, 100)]
    plot_curves(steps, tmp_path / "without.png", "")
    plot_curves([held_out[0], *steps, held_out[1]], tmp_path / "with.png", "")
    assert picture(tmp_path / "with.png")[1] > picture(tmp_path / "without.png")[1] + 100


@pytest.mark.parametrize("title", [r"$\frac{broken$ 50 $$", "run_1^2 \\boxed{$x$}", ""])
def test_a_title_is_printed_as_it_is(tmp_path: Path, title: str) -> None:
    plot_curves([line(1)], tmp_path / "curves.png", title)
    assert picture(tmp_path / "curves.png")[1] > 0


def test_steps_without_a_value_are_left_out() -> None:
    metrics = [{"step": 0, "eval/accuracy": 0.1}, {"step": 1}, {"step": 2, "eval/accuracy": None}]
    assert series(metrics, "eval/accuracy") == ([0], [0.1])


def test_one_null_does_not_stop_the_plot(tmp_path: Path) -> None:
    plot_curves([line(1) | {"reward/mean": None}, {"step": 2}, line(3)], tmp_path / "curves.png", "tiny")
    assert picture(tmp_path / "curves.png")[1] > 0


def test_the_largest_and_the_smallest_numbers_do_not_stop_the_plot(tmp_path: Path) -> None:
    """One panel each: numbers that are too far apart, nearly equal, and a single one."""
    extremes = {"reward/mean": [1e308, -1e308], "reward/accuracy": [0.0, 2.2e-309], "rollout/length_mean": [1e308]}
    lines = [
        {"step": step, **{name: values[step] for name, values in extremes.items() if step < len(values)}}
        for step in range(2)
    ]
    plot_curves(lines, tmp_path / "curves.png", "tiny")
    assert picture(tmp_path / "curves.png")[1] > 0


@given(st.lists(st.floats(-1e6, 1e6), max_size=120))
def test_smoothing_stays_within_the_values(values: list[float]) -> None:
    smoothed = smooth(values)
    assert len(smoothed) == len(values)
    assert all(min(values) - 1e-6 <= value <= max(values) + 1e-6 for value in smoothed)
    if len(values) < 40:
        assert smoothed == values


@pytest.mark.parametrize(
    ("name", "panels"),
    [("reward/mean", OF_POLICIES), ("reward_model/loss", OF_PAIRS), ("process_reward_model/loss", OF_STEPS)],
)
def test_the_panels_are_of_what_the_run_trains(name: str, panels: dict[str, tuple[str, ...]], tmp_path: Path) -> None:
    lines = [{"step": step, name: 1 / step} for step in range(1, 40)]
    assert panels_of(lines) == panels
    plot_curves(lines, tmp_path / "curves.png", "mine")
    plot_curves([], tmp_path / "empty.png", "mine")
    assert picture(tmp_path / "curves.png")[1] > picture(tmp_path / "empty.png")[1] + 100
