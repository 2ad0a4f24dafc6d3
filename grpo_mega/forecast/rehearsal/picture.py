"""A picture of a rank's memory over a step: who holds it, what is at work on top, and how much there is."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_mega.forecast.planning.lines import of_the_trainer
from grpo_mega.platform.files import write_atomic

GB = 1e9


def draw(measured: Mapping[str, Any], lines: Mapping[str, float], path: Path) -> None:
    """Writes a PNG, atomically: phases from left to right, equally wide, and within them the allocator's events.

    Args:
        measured: What a rank's rehearsal measured.
        lines: The planner's of its stage.
        path: Where the PNG goes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    phases = measured["phases"]
    figure = Figure(figsize=(13, 6), layout="constrained")
    axis = figure.add_subplot()
    kinds = [kind for kind in phases[-1]["held"] if any(phase["held"].get(kind) for phase in phases)]
    edges = [*range(len(phases) + 1)]
    levels = [[0.0, *(phase["held"].get(kind, 0) / GB for phase in phases)] for kind in kinds]
    if kinds:
        axis.stackplot(edges, levels, labels=kinds, alpha=0.75)
    for number, phase in enumerate(phases):
        curve = [size / GB for size in phase["curve"]]
        at = [number + i / max(len(curve) - 1, 1) for i in range(len(curve))]
        axis.plot(at, curve, color="black", linewidth=0.9, label="allocated" if number == 0 else "")
        reserved = phase["peak_reserved"] / GB
        axis.hlines(reserved, number, number + 1, color="gray", label="reserved, at most" if number == 0 else "")
    room = (measured["capacity"] - measured["taken"]) / GB
    axis.axhline(room, color="firebrick", label=f"room, beside {measured['taken'] / GB:.0f} GB of others")
    axis.axhline(of_the_trainer(lines) / GB, color="firebrick", linestyle=":", label="planned")
    axis.set_xticks(
        [edge + 0.5 for edge in edges[:-1]], [phase["name"].replace(", ", "\n") for phase in phases], fontsize=8
    )
    axis.set_xlim(0, len(phases))
    axis.set_ylim(0)
    axis.set_ylabel("GB")
    axis.set_title(f"rank {measured['rank']}, pipeline stage {measured['stage']}, {measured['sequences']} sequences")
    figure.legend(fontsize=8, loc="outside right upper")
    image = io.BytesIO()
    FigureCanvasAgg(figure).print_png(image)
    write_atomic(path, image.getvalue())
