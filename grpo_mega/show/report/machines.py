"""What the page shows of machines and experts: the lanes of ranks, and the load of experts, both bounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_mega.observe.foreign import finite
from grpo_mega.show.report import words
from grpo_mega.show.report.read import Record, RunData
from grpo_mega.show.traces.lanes import CHANGE, ENGINE, Lane, Lanes

Packed = dict[str, Any]

CELLS = 300_000
"""Largest number of experts' loads in a page: layers * experts * steps, all runs together."""
MOST = 4096
"""Largest number of layers, and of experts in a layer, in a valid line."""
MOST_STEPS = 64
"""Largest number of steps whose loads are shown, evenly spread over the run."""


def devices(run: RunData) -> Packed | None:
    """The lanes of the ranks in the newest steps with traces; None without any."""
    found = run.lanes
    if found is None or not any(lane.spans for lane in found.lanes):
        return None
    names = list(dict.fromkeys(name for lane in found.lanes for *_, name in lane.spans))
    most = max((held for lane in found.lanes for _, held in lane.memory + lane.engine_memory), default=0.0)
    # Engines of SGLang take turns on the trainer's devices; the embedded one generates with the trainer.
    rollout = run.config.get("rollout")
    shared = isinstance(rollout, dict) and rollout.get("engine") == "sglang"
    # Who has the devices in a phase; "change" while they change hands.
    owner = {name: "engine" if name in ENGINE else "change" if name in CHANGE else "trainer" for name in names}
    return {
        "steps": [[step, _short(begin), _short(end)] for step, begin, end in found.steps],
        "seconds": _short(found.seconds),
        "phases": [{"name": name, "owner": owner[name] if shared else "trainer"} for name in names],
        "most_gb": _short(most),
        "lanes": [_lane(lane, names, found) for lane in found.lanes],
        "left_out": sum(lane.left_out for lane in found.lanes),
        "ranks": run.traced,
        "shared": shared,
    }


def _lane(lane: Lane, names: Sequence[str], of: Lanes) -> Packed:
    spent = [_short(sum(end - begin for begin, end, name in lane.spans if name == phase)) for phase in names]
    return {
        "rank": lane.rank,
        "spans": [[_short(begin), _short(end), names.index(name)] for begin, end, name in lane.spans],
        "seconds": spent,
        "memory": _curve(lane.memory, of),
        "engine_memory": _curve(lane.engine_memory, of),
    }


def _curve(memory: Sequence[tuple[float, float]], of: Lanes) -> list[list[float]]:
    return [[_short(at), _short(held)] for at, held in memory if 0 <= at <= of.seconds]


def planned(run: RunData) -> Packed | None:
    """Planned and measured seconds by phase, and peak memory in GB, of some steps; None if they were not compared."""
    found = run.planned
    seconds, memory, steps = found.get("seconds"), found.get("memory"), found.get("steps")
    if not (isinstance(seconds, dict) and isinstance(memory, list) and isinstance(steps, list)):
        return None
    rows = [[phase, *map(finite, pair)] for phase, pair in seconds.items() if isinstance(pair, list)]
    length = words.number(finite(found.get("answer")) or 0.0)
    title = f"Steps {' and '.join(map(str, steps))} as planned for {found.get('gpus')} {found.get('gpu')}, and "
    return {
        "title": f"{title[:500]}as measured; completions of {length} tokens",
        "rows": [row for row in rows if len(row) == 3],
        "memory": [finite(size) for size in memory][:2],
    }


def experts(run: RunData, cells: int = CELLS) -> Packed | None:
    """The load of each expert, relative to the average of its layer, in evenly spread steps; None for a dense model.

    There are at most `cells` numbers, and no steps if a single one has more. Lines with another shape than the last
    line's are left out, and counted.
    """
    if not run.experts:
        return None
    lines = [(int(record["step"]), loads) for record in run.experts if (loads := _loads(record)) is not None]
    layers = {layer: len(own) for layer, own in lines[-1][1].items()} if lines else {}
    alike = [(step, loads) for step, loads in lines if {layer: len(own) for layer, own in loads.items()} == layers]
    each = sum(layers.values())
    count = min(len(alike), MOST_STEPS, cells // max(each, 1))
    chosen = [alike[index * (len(alike) - 1) // max(count - 1, 1)] for index in range(count)]
    if count == 1:
        chosen = alike[-1:]
    shown = []
    for layer, size in (layers if chosen else {}).items():
        # In percent of the average expert's load.
        percent = [[round(100 * loads[layer][expert]) for _, loads in chosen] for expert in range(size)]
        shown.append({"layer": layer, "loads": percent})
    return {
        "steps": [step for step, _ in chosen],
        "recorded": len(alike),
        "others": len(run.experts) - len(alike),
        "each": each,
        "room": cells,
        "layers": shown,
    }


def _loads(record: Record) -> dict[int, list[float]] | None:
    """Layer -> loads, from a line of experts.jsonl; None if the line is not valid."""
    step, given = record.get("step"), record.get("loads")
    # JavaScript holds whole numbers up to 2**53 exactly. In Python, True is an int as well.
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**53 or not isinstance(given, dict):
        return None
    found = {}
    for layer, own in given.items():
        if not (layer.isascii() and layer.isdigit() and len(layer) < 6 and isinstance(own, list) and own):
            return None
        # An expert that gets all tokens has as many times the average as there are experts.
        values = [value for each in own if (value := finite(each)) is not None and 0 <= value <= len(own)]
        if len(values) != len(own) or len(own) > MOST:
            return None
        found[int(layer)] = values
    return dict(sorted(found.items())) if len(found) <= MOST else None


def _short(seconds: float) -> float:
    """The seconds, rounded to the precision that a screen can show."""
    return float(f"{seconds:.5g}")
