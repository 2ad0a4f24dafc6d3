"""The end of an evaluation: its results as files, a table and curves."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_mega.evaluate import results
from grpo_mega.evaluate.estimates import Estimate
from grpo_mega.evaluate.measure import ACCURACY, ERRORS, WITHIN, by_task, measure, unscorable_in
from grpo_mega.evaluate.results import CONTINUES, RESULTS
from grpo_mega.evaluate.subject import Subject
from grpo_mega.evaluate.votes import ballot_of
from grpo_mega.platform.files import write_atomic
from grpo_mega.show.console.columns import shorten
from grpo_mega.show.plot import BLUE, INK, ORANGE

SHOWN = 200
"""Characters of a problem that are shown."""


def conclude(folder: Path, made: Subject, settings: dict[str, Any]) -> None:
    """Writes samples.jsonl, curves.png and, last, results.json."""
    records = results.collect(folder, made.prompts)
    groups, votes = results.groups_of(made.prompts, records)
    votable = ballot_of(made.config.reward) and CONTINUES not in settings
    success, cast = made.config.reward.success, votes if votable else None
    within = results.within_of(records, settings.get("budgets", ()))
    overall = measure(groups, cast, success, within)
    if made.config.eval.samples > 1:
        draw(overall, folder / results.CURVES, made.name)
    if within:
        draw_budgets(overall, settings["sampling"]["max_new_tokens"], folder / results.BUDGETS, made.name)
    tasks = by_task(groups, cast, success, within)
    found = {"of": made.name, "unscorable": unscorable_in(groups), "all": overall, "tasks": tasks}
    # Last: curation and recipes take a folder with results.json for a finished evaluation.
    results.write_results(folder, found | {"settings": settings})


def shown(folder: Path, made: Subject, settings: dict[str, Any]) -> str:
    """Results of the folder as text."""
    found = json.loads((folder / RESULTS).read_text())
    columns = {"all": found["all"]} | (found["tasks"] if len(found["tasks"]) > 1 else {})
    estimates = {title: {n: Estimate(**e) for n, e in column.items()} for title, column in columns.items()}
    sampling = settings["sampling"]
    title = (
        f"{made.name}: {len(made.prompts)} problems x {settings['samples']} samples, temperature "
        f"{sampling['temperature']:g}, top-p {sampling['top_p']:g}, up to {sampling['max_new_tokens']} tokens"
        f"{', by SGLang' if 'engine' in settings else ''}\n"
        f"asked, for example: {shorten(made.prompts[0].text, SHOWN)!r}"
    )
    unscorable = f"\n{found['unscorable']} samples could not be scored" if found["unscorable"] else ""
    return f"{title}\n\n{table(estimates)}{unscorable}\n\nmeans with 95 % intervals; everything is in {folder}"


def table(columns: Mapping[str, Mapping[str, Estimate]]) -> str:
    """Table with a line for each name and a column for each title: the mean with its 95 % interval.

    Args:
        columns: Title -> name -> estimate; the first column has all names.
    """
    names = [*next(iter(columns.values()))]
    rows = [["", *columns]]
    rows.append(["problems", *(str(max(e.problems for e in column.values())) for column in columns.values())])
    for name in names:
        title = f"{name} (pass@1)" if name == ACCURACY else name
        rows.append([title, *(_cell(name, column.get(name)) for column in columns.values())])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def draw(estimates: Mapping[str, Estimate], path: Path, title: str) -> None:
    """Draws pass@k, maj@k and rm@k against k, with their intervals, and writes a PNG atomically.

    Args:
        estimates: Estimates over all problems, by name.
        path: The PNG file.
        title: Text above, printed literally.
    """
    curves = {f"{kind}@k": _curve(estimates, kind) for kind in ("pass", "maj", "rm")}
    if ACCURACY in estimates:
        curves["pass@k"] = {1: estimates[ACCURACY]} | curves["pass@k"]
    _draw(curves, "k", path, title)


def draw_budgets(estimates: Mapping[str, Estimate], longest: int, path: Path, title: str) -> None:
    """Draws the accuracy of cut completions against the token budget; see `draw`.

    Args:
        estimates: Estimates over all problems, by name.
        longest: Tokens of the longest completion, at which the accuracy is that of whole completions.
        path: The PNG file.
        title: Text above, printed literally.
    """
    curve = _curve(estimates, WITHIN) | ({longest: estimates[ACCURACY]} if ACCURACY in estimates else {})
    _draw({"accuracy": curve}, "tokens of a completion, at most", path, title)


def _curve(estimates: Mapping[str, Estimate], kind: str) -> dict[int, Estimate]:
    return {int(name.partition("@")[2]): e for name, e in estimates.items() if name.startswith(f"{kind}@")}


def _draw(curves: Mapping[str, Mapping[int, Estimate]], across: str, path: Path, title: str) -> None:
    """Draws up to three curves, by their labels, on a logarithmic axis."""
    # Imported here: it takes a second, and only the end of an evaluation draws.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), dpi=150, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=INK, parse_math=False)
    axes = figure.subplots()
    for (label, curve), color in zip(curves.items(), (BLUE, ORANGE, INK), strict=False):
        if not curve:
            continue
        axes.plot(
            [*curve], [e.mean for e in curve.values()], "o-", color=color, linewidth=1.8, markersize=4, label=label
        )
        bounded = {x: (e.low, e.high) for x, e in curve.items() if e.low is not None and e.high is not None}
        lows, highs = [low for low, _ in bounded.values()], [high for _, high in bounded.values()]
        axes.fill_between([*bounded], lows, highs, color=color, alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(across, fontsize=9, color=INK)
    axes.set_ylim(-0.03, 1.03)
    axes.tick_params(labelsize=8, colors=INK, length=3)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    write_atomic(path, png.getvalue())


def _cell(name: str, estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    share = "@" in name or name in (ACCURACY, "format", "truncated", ERRORS)
    numbers = [estimate.mean, estimate.low, estimate.high]
    texts = ["?" if x is None else f"{100 * x:.1f}" if share else f"{x:.4g}" for x in numbers]
    return f"{texts[0]}{' %' if share else ''} [{texts[1]}, {texts[2]}]"
