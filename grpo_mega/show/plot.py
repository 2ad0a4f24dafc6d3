"""Plots curves.png: what a run learns, over its steps; `metric_table.py` has the names of metrics."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_mega.observe.metrics import METRICS, read_metrics
from grpo_mega.observe.recorder import Observer
from grpo_mega.platform.files import write_atomic
from grpo_mega.show.console.columns import column, mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, INK = "#1f5fa8", "#d9731a", "#333333"
COLORS = (BLUE, ORANGE, INK)
MOST = 1e300
"""Largest value that is drawn: matplotlib finds no ticks near the largest floats."""
OF_POLICIES = {
    "Reward": ("reward/mean", "reward/format"),
    "Accuracy": ("reward/accuracy", "eval/accuracy", "eval/heldout/accuracy"),
    "Response length": ("rollout/length_mean",),
}
"""Panel -> its metrics, for a run that trains a policy."""
OF_PAIRS = {
    "Loss": ("reward_model/loss",),
    "Accuracy": ("reward_model/accuracy", "eval/accuracy", "eval/heldout/accuracy"),
    "Margin": ("reward_model/margin",),
}
"""Panel -> its metrics, for a run that trains a reward model."""
OF_STEPS = {
    "Loss": ("process_reward_model/loss",),
    "Accuracy": ("process_reward_model/accuracy", "eval/accuracy", "eval/heldout/accuracy"),
    "Gradient norm": ("process_reward_model/grad_norm",),
}
"""Panel -> its metrics, for a run that trains a process reward model."""


class Curves(Observer):
    """Draws curves.png at the end of a run."""

    at_the_end = "curves"

    def __init__(self, path: Path) -> None:
        self._path = path

    def finish(self, summary: dict[str, Any]) -> None:
        """Draws what the run has recorded."""
        plot_curves(read_metrics(self._path / METRICS), self._path / "curves.png", self._path.name)


def plot_curves(metrics: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draws three panels (for a policy reward, accuracy and response length) and writes a PNG atomically.

    Args:
        metrics: Lines of metrics.jsonl; a metric may be absent or null at any step.
        path: The PNG file.
        title: Text above the panels, printed literally.
    """
    # Imported here: it takes a second, and only the end of a run plots.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), dpi=150, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=INK, parse_math=False)
    panels = panels_of(metrics)
    for axes, (name, curves) in zip(figure.subplots(1, len(panels), sharex=True), panels.items(), strict=True):
        for curve, color in zip(curves, COLORS, strict=False):
            steps, values = series(metrics, curve)
            label = column(curve).title
            if steps and curve.startswith("eval/"):
                axes.plot(steps, values, "o-", color=color, linewidth=1.0, markersize=4, label=label)
            elif steps:
                axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
                axes.plot(steps, smooth(values), color=color, linewidth=1.8, label=label)
        if name == "Accuracy":
            axes.set_ylim(-0.03, 1.03)
        dress(axes, name)
        axes.set_xlabel("step", fontsize=9, color=INK)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    write_atomic(path, png.getvalue())


def panels_of(metrics: list[dict[str, Any]]) -> dict[str, tuple[str, ...]]:
    """The panels of a run, chosen by the metrics that it has recorded; those of a policy if there are none."""
    names = {name for line in metrics for name in line}
    return next((panels for panels in (OF_PAIRS, OF_STEPS) if names & {*panels["Loss"]}), OF_POLICIES)


def series(metrics: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, without the steps where it is absent, null or too large for axes."""
    found = ((line["step"], line.get(name)) for line in metrics)
    known = [(step, value) for step, value in found if value is not None and abs(value) <= MOST]
    return [step for step, _ in known], [value for _, value in known]


def smooth(values: list[float]) -> list[float]:
    """Centred running mean over about a twentieth of the values; shorter at both ends."""
    half = len(values) // 40
    return [mean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def dress(axes: Axes, name: str) -> None:
    """Gives a panel its title, light lines and, if anything in it has a label, a legend."""
    axes.set_title(name, loc="left", fontsize=10, color=INK)
    axes.tick_params(labelsize=8, colors=INK, length=3)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)
