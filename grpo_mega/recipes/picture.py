"""Draws chain.png: held-out results of a recipe's models, stage after stage."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_mega.platform.files import write_atomic
from grpo_mega.recipes.progress import RecipeProgress
from grpo_mega.recipes.recipe import Recipe
from grpo_mega.show.plot import BLUE, INK, dress

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = {
    "accuracy": "Accuracy",
    "format": "Format",
    "language": "Language consistency",
    "length": "Tokens per response",
}


def plot_chain(recipe: Recipe, known: Mapping[str, RecipeProgress]) -> Path | None:
    """Draws a panel for each measurement of the finished runs, with a bar for each run; writes ROOT/chain.png.

    Returns:
        The file; None when there is nothing to draw.
    """
    values = {
        name: one.report["achieved"]
        for name, one in known.items()
        if recipe.stages[name].kind == "run" and "accuracy" in one.report.get("achieved", {})
    }
    panels = [name for name in PANELS if any(name in of_run for of_run in values.values())]
    if not values:
        return None
    # Imported here because it takes a second, and only this function needs it.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(panels) + 1.5, 0.8 + 0.34 * len(values)), dpi=150, layout="constrained")
    figure.suptitle(f"{recipe.name}: held-out problems", x=0.01, ha="left", fontsize=12, color=INK, parse_math=False)
    rows = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, name in zip(rows, panels, strict=True):
        _bars(axes, list(values), [of_run.get(name, 0.0) for of_run in values.values()], PANELS[name])
    # All panels share the axis, so inverting one puts the first stage on top in each.
    rows[0].invert_yaxis()
    path, png = recipe.root / "chain.png", io.BytesIO()
    figure.savefig(png, format="png")
    write_atomic(path, png.getvalue())
    return path


def _bars(axes: Axes, names: Sequence[str], values: Sequence[float], title: str) -> None:
    """Draws a bar for each name, with its value next to it."""
    places = range(len(names))
    axes.barh(places, values, color=BLUE, height=0.62)
    axes.set_yticks(places, names)
    shares = max(values) <= 1
    for place, value in zip(places, values, strict=True):
        axes.annotate(
            f"{value:.1%}" if shares else f"{value:.1f}", (value, place), xytext=(3, 0),
            textcoords="offset points", va="center", fontsize=8, color=INK,
        )  # fmt: skip
    axes.set_xlim(0, 1.22 if shares else 1.22 * max(values))
    if shares:
        axes.set_xticks((0, 0.5, 1))
    dress(axes, title)
