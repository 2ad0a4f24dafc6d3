"""Strategies of generation side by side: whole completions, and slices of several lengths, orders and reserves.

`tools/simulate.py` prints the table. The lengths of completions are assumed, or those of an earlier run.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import NormalDist, fmean, variance
from typing import Any

from grpo_mega.config.schema import Config
from grpo_mega.errors import InputError
from grpo_mega.forecast.planning.choice import choose, machines_ahead
from grpo_mega.forecast.planning.generation import SHARE, SPREAD, completion_lengths
from grpo_mega.forecast.planning.hours import cache_room, job_of
from grpo_mega.forecast.planning.plan import plan, planned_vocabulary
from grpo_mega.forecast.planning.slices import ALIKE, MEASURED, Lengths, steady
from grpo_mega.forecast.planning.time import PROMPT, engines_of
from grpo_mega.rollout.stream import Slices, slices_of

TABLE = 4096
"""Lengths in the table of an assumed distribution."""
NEWEST = 4096
"""Newest completions of an earlier run that are read: lengths change while a run learns."""


def compare_strategies(
    config: Config, lengths: Lengths, prompt: int = PROMPT, measured: int = MEASURED
) -> list[dict[str, Any]]:
    """Whole completions first, then the run's own slices if it has them, then others; each as JSON.

    Seconds are those of generation alone. `bound` is `Slices.most_steps_late`, `gain` the tokens a second over those of
    whole completions.

    Raises:
        InputError: `cluster.gpu` is not given, the engines have no room for the longest completion, or the run cannot
            be planned.
    """
    if config.layout.undecided:
        machines = machines_ahead(config.cluster)
        chosen = choose(config, planned_vocabulary(config.model, config.data), machines)
        config = replace(chosen.config, cluster=machines)
    planned = plan(config)
    job = job_of(config, planned)
    if job is None:
        raise InputError("cluster.gpu=null", "no GPU is named to plan for", "set cluster.gpu, or choose cluster=h100")
    engines = engines_of(job, prompt, cache_room(job, planned["engine"]))
    own = slices_of(config.rollout, config.algorithm.prompts_per_step)
    longest, size = config.rollout.max_new_tokens, config.algorithm.group_size
    rows: list[dict[str, Any]] = []
    for slices in _strategies(own, lengths.mean, longest):
        found = steady(engines, lengths, slices, size, longest, own.per_step, measured)
        bound = slices.most_steps_late(longest) if slices.tokens else 0
        speed = found.tokens / found.seconds
        gain = speed / rows[0]["speed"] if rows else 1.0
        about: dict[str, Any] = {"slice_tokens": slices.tokens, "groups": slices.in_flight}
        about |= {name: getattr(slices, name) for name in ("reserve", "order", "ahead")}
        rows.append(about | asdict(found) | {"bound": bound, "speed": speed, "gain": gain})
    return rows


def _strategies(own: Slices, mean: float, longest: int) -> list[Slices]:
    """Whole completions, the run's own slices, and slices of half, one and two mean lengths in both orders; then slices
    of the mean length that are fuller, by a reserve or twice as many groups in flight, and that are generated ahead."""
    whole = Slices(None, own.per_step, "finished", own.per_step)
    sizes = [size for size in (round(mean / 2), round(mean), round(2 * mean)) if 1 <= size < longest]
    others = [replace(own, tokens=size, order=order) for size in sizes for order in ("finished", "submitted")]
    of_mean = replace(own, tokens=max(1, round(mean)), order="finished")
    fuller = [replace(of_mean, reserve=own.in_flight), replace(of_mean, in_flight=2 * own.in_flight)]
    ahead = replace(of_mean, ahead=True)
    return [*dict.fromkeys([whole, *([own] if own.tokens else []), *others, *fuller, ahead])]


def assumed_lengths(mean: float | None, longest: int, spread: float = SPREAD, alike: float = ALIKE) -> Lengths:
    """Lengths of a log-normal distribution, cut at `longest`; see `completion_lengths` and `Lengths`.

    Raises:
        InputError: A figure is out of range.
    """
    # Not `spread < 0`, which would let NaN pass.
    if not 0 <= spread <= 5:
        raise InputError(f"--spread {spread:g}", "not between 0 and 5", "choose a standard deviation such as 0.7")
    if not 0 <= alike <= 1:
        raise InputError(f"--alike {alike:g}", "not between 0 and 1", "choose a correlation such as 0.5")
    mean = max(1.0, SHARE * longest) if mean is None else mean
    return Lengths(sorted(completion_lengths(TABLE, mean, longest, spread)), alike)


def lengths_of_run(folder: Path, longest: int) -> Lengths:
    """Lengths of the newest completions in samples/ of a run directory, cut at `longest`, and how alike those of a
    group are.

    Raises:
        InputError: There are not two groups of several completions, or a line is not a sample.
    """
    groups: list[list[int]] = []
    for file in sorted((folder / "samples").glob("step-*.jsonl"), reverse=True):
        of_file: dict[int, list[int]] = {}
        for number, line in enumerate(file.read_text().splitlines(), start=1):
            try:
                record = json.loads(line)
                of_file.setdefault(record["group"], []).append(max(1, min(longest, int(record["tokens"]))))
            except (ValueError, KeyError, TypeError) as error:
                what = f"not a sample ({type(error).__name__}: {error})"
                raise InputError(f"{file}:{number}", what, "give the directory of a run of this project") from None
        groups += of_file.values()
        if sum(map(len, groups)) >= NEWEST:
            break
    several = [group for group in groups if len(group) > 1]
    if len(several) < 2:
        raise InputError(
            f"--run {folder}",
            "fewer than two groups of several completions in samples/step-*.jsonl",
            "give a run directory with run.sample_groups_per_step above 0, or --completion-tokens",
        )
    table = sorted(length for group in groups for length in group)
    return Lengths(table, _alike(table, several))


def _alike(table: Sequence[int], groups: Sequence[Sequence[int]]) -> float:
    """The intraclass correlation of the normal scores of lengths, from an analysis of variance."""
    normal = NormalDist()

    def score(length: int) -> float:
        return normal.inv_cdf((bisect_left(table, length) + bisect_right(table, length)) / 2 / len(table))

    scores = [[*map(score, group)] for group in groups]
    size, within = fmean(map(len, scores)), fmean(map(variance, scores))
    between = size * variance(map(fmean, scores))
    total = between + (size - 1) * within
    return min(1.0, max(0.0, (between - within) / total)) if total else 1.0


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of `compare_strategies` as text."""
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "slice": lambda row: f"{row['slice_tokens']:,}" if row["slice_tokens"] else "none",
        "order": lambda row: (row["order"] if row["slice_tokens"] else "") + (" ahead" if row["ahead"] else ""),
        "groups": lambda row: f"{row['groups']:,}",
        "reserve": lambda row: f"{row['reserve']:,}",
        "s a step": lambda row: f"{row['seconds']:,.1f}",
        "tokens/s": lambda row: f"{row['speed']:,.0f}",
        "gain": lambda row: f"{row['gain']:.2f}x",
        "reading": lambda row: f"{row['reading'] / row['seconds']:.1%}",
        "at once": lambda row: f"{row['most']:,}",
        "steps old": lambda row: f"{row['age']:.2f}",
        "oldest": lambda row: f"{row['oldest']}",
        "bound": lambda row: f"{row['bound']}",
        "waiting": lambda row: f"{row['in_flight']:,.0f}",
        "length": lambda row: f"{row['length']:,.0f}",
        "at first": lambda row: f"{row['first']:,.0f}",
    }
    lines = [[*columns], *([cell(row) for cell in columns.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
