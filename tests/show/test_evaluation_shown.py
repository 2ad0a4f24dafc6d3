"""An evaluation as a table and as a picture."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from grpo_mega.evaluate.estimates import Estimate
from grpo_mega.show.evaluation import draw, draw_budgets, table

SUMS = {
    "accuracy": Estimate(0.5, 0.4, 0.6, 100),
    "brevity": Estimate(0.0625, 0.06, 0.065, 100),
    "length": Estimate(31.25, 30.0, 32.5, 100),
    "pass@2": Estimate(0.75, 0.7, 0.8, 100),
    "maj@2": Estimate(0.5, None, None, 1),
}


def test_a_table_has_a_column_for_each_task() -> None:
    code = {"accuracy": Estimate(0.125, 0.1, 0.15, 40)}
    lines = table({"all": SUMS, "code": code}).splitlines()
    assert [line.split() for line in lines] == [
        ["all", "code"],
        ["problems", "100", "40"],
        ["accuracy", "(pass@1)", "50.0", "%", "[40.0,", "60.0]", "12.5", "%", "[10.0,", "15.0]"],
        ["brevity", "0.0625", "[0.06,", "0.065]", "-"],
        ["length", "31.25", "[30,", "32.5]", "-"],
        ["pass@2", "75.0", "%", "[70.0,", "80.0]", "-"],
        ["maj@2", "50.0", "%", "[?,", "?]", "-"],
    ]
    assert len({len(line) for line in lines[:2]}) == 1, "columns are aligned"


def ink(path: Path) -> int:
    with Image.open(path) as image:
        assert image.size == (900, 540)
        return sum(image.convert("L").histogram()[:250])


def test_a_picture_has_every_curve(tmp_path: Path) -> None:
    alone = {name: estimate for name, estimate in SUMS.items() if "maj" not in name}
    narrow = alone | {"pass@2": Estimate(0.75, 0.75, 0.75, 100), "accuracy": Estimate(0.5, 0.5, 0.5, 100)}
    for name, estimates in (("all", SUMS), ("alone", alone), ("narrow", narrow)):
        draw(estimates, tmp_path / f"{name}.png", "run_$x")
    assert ink(tmp_path / "all.png") > ink(tmp_path / "alone.png") + 100, "a second curve"
    assert ink(tmp_path / "alone.png") > ink(tmp_path / "narrow.png") + 1000, "the interval"


def test_a_picture_of_budgets_ends_with_whole_completions(tmp_path: Path) -> None:
    budgets = {"within@16": Estimate(0.1, 0.1, 0.1, 100), "within@32": Estimate(0.2, 0.2, 0.2, 100)}
    whole = {"accuracy": Estimate(0.9, 0.9, 0.9, 100)}
    draw_budgets(budgets, 64, tmp_path / "cut.png", "run")
    draw_budgets(budgets | whole, 64, tmp_path / "all.png", "run")
    assert ink(tmp_path / "all.png") > ink(tmp_path / "cut.png") + 100
