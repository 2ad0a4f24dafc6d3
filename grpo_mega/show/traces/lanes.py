"""Timelines of ranks from the traces of the newest steps: phases one after the other, and memory.

Where engines share the GPUs with the trainer, they have them in the phases of `ENGINE`; in `CHANGE` they change hands,
and what the engine's processes hold then is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_mega.observe.foreign import finite
from grpo_mega.platform.trace import HOLDERS
from grpo_mega.show.traces.trace_files import Event, Interval, RankTrace, steps_of

ENGINE, CHANGE = ("generate", "evaluate", "reward"), ("sync",)
"""Phases in which engines generate (in "reward" while samples are scored), and in which the device changes hands."""
MOST_SPANS = 400
"""Largest number of spans in a lane; where there are more, the shortest are left out."""
MOST_POINTS = 200
"""Largest number of points in a curve of memory; each is the maximum over a stretch of time."""


@dataclass(frozen=True)
class Lane:
    """Timeline of one rank.

    Attributes:
        rank: Its number.
        spans: (begin, end, phase) in seconds since the beginning of all lanes, one after the other.
        left_out: Spans that are too short to be shown.
        memory: (time, 10^9 bytes) of the rank's process: what torch holds of a GPU, resident memory without one.
        engine_memory: (time, 10^9 bytes) of its engine's processes, whenever the device changes hands; empty without an
            engine.
    """

    rank: int
    spans: list[tuple[float, float, str]]
    left_out: int
    memory: list[tuple[float, float]]
    engine_memory: list[tuple[float, float]]


@dataclass(frozen=True)
class Lanes:
    """Timelines of ranks, on a common clock.

    Attributes:
        steps: (number, begin, end) of each step, on the first rank.
        seconds: Length of the lanes.
        lanes: One for each rank, in order.
    """

    steps: list[tuple[int, float, float]]
    seconds: float
    lanes: list[Lane]


def lanes(traces: Sequence[RankTrace], steps: range) -> Lanes | None:
    """The lanes of these ranks, from the first of the steps to the last; None when no trace has any of them."""
    of_ranks = [{step: when for step, (_, when) in steps_of(trace).items() if step in steps} for trace in traces]
    times = [when for found in of_ranks for when in found.values()]
    if not times or not of_ranks[0]:
        return None
    begin, end = min(since for since, _ in times), max(until for _, until in times)
    if not end > begin:
        return None
    numbered = [(n, (since - begin) / 1e6, (until - begin) / 1e6) for n, (since, until) in sorted(of_ranks[0].items())]
    own = []
    for trace in traces:
        spans = _phases([event for event in trace.events if begin <= event.get("ts", -1.0) <= end])
        shown = sorted(sorted(spans, key=lambda span: span[0] - span[1])[:MOST_SPANS])
        seconds = [((since - begin) / 1e6, (until - begin) / 1e6, name) for since, until, name in shown]
        memory = _memory(trace, (begin, end), "memory", "reserved GB", "resident GB")
        engine_memory = _memory(trace, (begin, end), HOLDERS, "engine GB")
        own.append(Lane(trace.rank, seconds, len(spans) - len(shown), memory, engine_memory))
    return Lanes(numbered, (end - begin) / 1e6, own)


def _phases(events: Sequence[Event]) -> list[tuple[float, float, str]]:
    """(begin, end, name) of the main thread's phases, in order; a phase that another interrupts continues after it."""
    found, begun, since = [], list[str](), 0.0
    for event in events:
        if event.get("tid") != 0 or event["ph"] not in ("B", "E") or event["name"] == "step":
            continue
        # The end of a phase that began before the window.
        if event["ph"] == "E" and event["name"] not in begun:
            continue
        if begun:
            found.append((since, event["ts"], begun[-1]))
        since = event["ts"]
        if event["ph"] == "B":
            begun.append(event["name"])
        else:
            begun.remove(event["name"])
    return [span for span in found if span[1] > span[0]]


def _memory(trace: RankTrace, window: Interval, counter: str, *holders: str) -> list[tuple[float, float]]:
    """(seconds, 10^9 bytes) of the first of these holders that the counter has."""
    found = []
    for event in trace.events:
        if event["ph"] == "C" and event["name"] == counter and window[0] <= event["ts"] <= window[1]:
            held = event.get("args", {})
            value = next((held[holder] for holder in holders if holder in held), None)
            if (size := finite(value)) is not None:
                found.append(((event["ts"] - window[0]) / 1e6, size))
    each = -(-len(found) // MOST_POINTS) or 1
    stretches = [found[at : at + each] for at in range(0, len(found), each)]
    return [(stretch[0][0], max(value for _, value in stretch)) for stretch in stretches]
