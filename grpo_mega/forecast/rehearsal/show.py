"""Shows what rehearsals measured: as text, and memory over the phases as a picture."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_mega.forecast.planning.lines import of_the_trainer
from grpo_mega.forecast.rehearsal.job import AT_WORK
from grpo_mega.platform.files import write_atomic

WAITS, COLLECTIVES = 6, 8
"""Rows that are printed of each."""
SMALL = 5e7
"""Bytes up to which an owner is left out of the line about the peak."""
OFF = 1e9
"""Bytes by which the planner may differ before a sentence says so."""
GB = 1e9


def peak(measured: dict[str, Any]) -> int:
    """Largest number of bytes that torch's allocator held of the GPU."""
    return max(phase["peak_reserved"] for phase in measured["phases"])


def worst_of(everyone: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A rank that does not fit, or else the rank that takes most memory."""
    return max(everyone, key=lambda measured: (measured["failure"] is not None, peak(measured)))


def show(measured: dict[str, Any], lines: Mapping[str, float]) -> None:
    """Prints one rank's phases, beside the planner's `lines` of its stage."""
    sizes = measured["lengths"]
    print(
        f"\nrank {measured['rank']}, pipeline stage {measured['stage']}: {len(sizes)} sequences of {min(sizes):,} to "
        f"{max(sizes):,} tokens ({measured['sequences']}), "
        f"{'with' if measured['transformer_engine'] else 'without'} Transformer Engine"
    )
    columns = ("GB: held", "peak", "reserved", "of host", "launches", "TFLOP", "waits", "pageable MB", "seconds")
    _row("", columns)
    for phase in measured["phases"]:
        pageable = phase["to_device_pageable"] + phase["to_host_pageable"]
        memory = [f"{phase[name] / 1e9:.1f}" for name in ("allocated", "peak_allocated", "peak_reserved", "host")]
        counts = [f"{phase['launches']:,}", f"{phase['flops'] / 1e12:,.1f}", f"{phase['waits']:,}"]
        _row(phase["name"], [*memory, *counts, f"{pageable / 1e6:.1f}", f"{phase['seconds']:.1f}"])
    # Who holds the memory of the GPU at its peak.
    fullest = max(measured["phases"], key=lambda phase: phase["peak_allocated"])
    held = {kind: size for kind, size in fullest["held"].items() if size > SMALL}
    passing = fullest["peak_allocated"] - sum(fullest["held"].values())
    owners = ", ".join(f"{kind} {size / 1e9:.1f}" for kind, size in held.items())
    print(f"at the peak, {fullest['name']}, GB: {owners or 'no model'}; transient {passing / 1e9:.1f}")
    _show_traffic(measured["phases"])
    print(against_plan(measured, lines))
    print(verdict(measured))


def _show_traffic(phases: Sequence[dict[str, Any]]) -> None:
    """Prints waits and collectives of the last update's pass (in the first, libraries start) and of a checkpoint."""
    saved = [phase for phase in phases if phase["name"].startswith("checkpoint")]
    most = max(saved, key=lambda phase: phase["waits"], default=None)
    for phase in filter(None, (last_of(phases, "gradients"), most)):
        if phase["places"]:
            print(f"where the host waits, {phase['name']}:")
            for place, times in [*phase["places"].items()][:WAITS]:
                print(f"{times:>8,}  {place}")
        if phase["collectives"]:
            print(f"what is sent, {phase['name']}:")
            for row in phase["collectives"][:COLLECTIVES]:
                print(f"{row['bytes'] / 1e9:>10.2f} GB  {row['calls']:>6,} x {row['collective']}, {row['group']}")


def last_of(phases: Sequence[dict[str, Any]], kind: str) -> dict[str, Any] | None:
    """The last phase whose name begins with this word, or None."""
    return next((phase for phase in reversed(phases) if phase["name"].startswith(kind)), None)


def against_plan(measured: dict[str, Any], lines: Mapping[str, float]) -> str:
    """The planned figures of a stage beside the measured ones, and a sentence where they differ by more than `OFF`.

    Fragments are bytes that the allocator reserves beyond requests; the planner has a share of the GPU for them.
    """
    phases = measured["phases"]
    at_work = sum(lines.get(name, 0.0) for name in AT_WORK)
    planned = {"held": of_the_trainer(lines) - at_work, "at work": at_work}
    held = phases[0]["allocated"]
    found = {"held": held, "at work": max(phase["peak_allocated"] for phase in phases) - held}
    fragments = peak(measured) - sum(found.values())
    text = "planned for this stage, beside libraries and engines: " + "; ".join(
        f"{planned[kind] / 1e9:.1f} GB {kind} (measured {found[kind] / 1e9:.1f})" for kind in planned
    )
    text += f"; fragments take {fragments / 1e9:.1f} GB"
    # After a failure the measured figures are incomplete, and a difference would mean nothing.
    if measured["failure"]:
        return text
    for kind in planned:
        more = found[kind] - planned[kind]
        if abs(more) > OFF:
            text += (
                f"\nthe planner is off: what is {kind} takes {abs(more) / 1e9:.1f} GB {'more' if more > 0 else 'less'}"
            )
    return text


def verdict(measured: dict[str, Any]) -> str:
    """One line: whether the rank fits, and by how much."""
    others = f"{measured['taken'] / 1e9:.1f} GB of libraries and a sleeping engine"
    if failure := measured["failure"]:
        return f"does not fit beside {others}: {failure['phase']}, at {failure['owner']}: {failure['message']}"
    most = peak(measured)
    spare = measured["capacity"] - measured["taken"] - most
    return f"fits: {most / 1e9:.1f} GB at most, beside {others}; {spare / 1e9:.1f} GB to spare"


def show_all(everyone: Sequence[dict[str, Any]], memories: Sequence[Mapping[str, float]]) -> None:
    """Prints a line for each rank, and the worst rank in full."""
    print()
    _row("rank (stage), sequences", ("planned GB", "held", "peak", "reserved", "launches", "waits"))
    for measured in everyone:
        lines, phases = memories[measured["stage"]], measured["phases"]
        gradients = last_of(phases, "gradients") or phases[-1]
        most = max(phase["peak_allocated"] for phase in phases)
        sizes = (of_the_trainer(lines), phases[0]["allocated"], most, peak(measured))
        _row(
            f"{measured['rank']} ({measured['stage']}), {measured['sequences']}",
            [f"{size / 1e9:.1f}" for size in sizes] + [f"{gradients[name]:,}" for name in ("launches", "waits")],
        )
        if measured["failure"]:
            print(f"  {verdict(measured)}")
    worst = worst_of(everyone)
    print("\nthe worst of these:", end="")
    show(worst, memories[worst["stage"]])


def _row(name: str, values: Sequence[Any]) -> None:
    print(f"{name:<28}" + "".join(f"{value!s:>12}" for value in values))


def draw(measured: Mapping[str, Any], lines: Mapping[str, float], path: Path) -> None:
    """Writes a PNG, atomically: phases from left to right, equally wide, and within them the allocator's events.

    Args:
        measured: What a rank's rehearsal measured.
        lines: The planner's lines of its stage.
        path: The PNG file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    phases = measured["phases"]
    figure = Figure(figsize=(13, 6), layout="constrained")
    axis = figure.add_subplot()
    # The lines below show the memory that each model holds after each phase.
    kinds = [kind for kind in phases[-1]["held"] if any(phase["held"].get(kind) for phase in phases)]
    edges = [*range(len(phases) + 1)]
    levels = [[0.0, *(phase["held"].get(kind, 0) / GB for phase in phases)] for kind in kinds]
    if kinds:
        axis.stackplot(edges, levels, labels=kinds, alpha=0.75)
    # Over it, what torch's allocator has given out within each phase, and the most that it has reserved.
    for number, phase in enumerate(phases):
        curve = [size / GB for size in phase["curve"]]
        at = [number + i / max(len(curve) - 1, 1) for i in range(len(curve))]
        axis.plot(at, curve, color="black", linewidth=0.9, label="allocated" if number == 0 else "")
        reserved = phase["peak_reserved"] / GB
        axis.hlines(reserved, number, number + 1, color="gray", label="reserved, at most" if number == 0 else "")
    # Across all phases, what the rank may take and what was planned.
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
