"""Reads the traces that the ranks of a run leave (`platform/trace.py`), whole or cut off, and joins them."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mega.errors import InputError
from grpo_mega.observe.foreign import contents, finite
from grpo_mega.platform.files import writing_atomic
from grpo_mega.platform.flight import Moment, read_flight
from grpo_mega.platform.trace import FOLDER as TRACE

Event = dict[str, Any]
Interval = tuple[float, float]
"""Beginning and end, in microseconds of the common clock."""
MOST_BYTES = 1 << 28
"""Largest size of a trace that is read; `platform/trace.py` bounds the events of a step."""
MOST_FLIGHT_BYTES = 1 << 20
"""Largest size of a flight recorder's file that is read; it has a fixed size."""


@dataclass(frozen=True)
class RankTrace:
    """Events of a rank, from its last two files, in order."""

    rank: int
    events: list[Event]

    @property
    def clock_error_us(self) -> float:
        """Largest possible difference between this rank's clock and the main rank's, in microseconds."""
        return max((e["args"].get("error_us", 0.0) for e in self.events if e.get("name") == "clock"), default=0.0)


def ranks_of(run: Path) -> list[int]:
    """The ranks that have left a trace, in order."""
    found = (re.fullmatch(r"rank-(\d+)\.json", path.name) for path in (run / TRACE).glob("rank-*.json"))
    return sorted(int(match[1]) for match in found if match)


def read_traces(run: Path, ranks: Iterable[int] | None = None) -> list[RankTrace]:
    """The traces of these ranks of a run directory; None for all ranks.

    Raises:
        InputError: The run has no trace; names the setting that records traces.
    """
    there = ranks_of(run)
    if not there:
        fix = "choose the directory of a run, such as runs/tiny, that kept some (run.keep_traces; 0 keeps none)"
        raise InputError(str(run / TRACE), "has no trace", fix)
    chosen = there if ranks is None else [*ranks]
    if absent := sorted({*chosen} - {*there}):
        fix = f"choose one of {there[0]} to {there[-1]}"
        raise InputError(str(run / TRACE), f"has no trace of rank {absent[0]}", fix)
    traces = []
    for rank in chosen:
        events: list[Event] = []
        for path in _files(run, rank):
            try:
                # A file that was cut off may end inside a character.
                text = contents(path, MOST_BYTES).decode(errors="replace")
            except ValueError as error:
                raise InputError(str(path), str(error), "remove it, or restore it") from None
            events += events_in(text)
        traces.append(RankTrace(rank, events))
    return traces


def _files(run: Path, rank: int) -> list[Path]:
    """The existing files of a rank's trace, in order."""
    paths = (run / TRACE / f"rank-{rank:05d}{end}" for end in (".before.json", ".json"))
    return [path for path in paths if path.is_file()]


def events_in(text: str) -> Iterator[Event]:
    """Yields the events of a file, without lines that are not whole, as kill -9 leaves the last one."""
    for line in text.splitlines():
        try:
            event = json.loads(line.rstrip().removesuffix(","))
        except (ValueError, RecursionError):
            continue
        known = isinstance(event, dict) and isinstance(event.get("ph"), str) and isinstance(event.get("name"), str)
        # Metadata has no time.
        times = [event.get("ts"), event.get("dur", 0.0)] if known and event["ph"] != "M" else []
        if known and all(finite(time) is not None for time in times):
            yield event


def size_of(run: Path, rank: int) -> int:
    """Bytes of a rank's traces."""
    return sum(path.stat().st_size for path in _files(run, rank))


def moments_in(file: Path) -> list[Moment]:
    """The latest moments of a flight recorder, without those at impossible times; empty if the file is unusable."""
    if not file.is_file() or file.stat().st_size > MOST_FLIGHT_BYTES:
        return []
    return [moment for moment in read_flight(file) if 0 <= moment.time < 1e11]


def steps_of(trace: RankTrace) -> dict[int, tuple[str, Interval]]:
    """Step -> its stage and interval, for the whole steps of the last stage; if a step ran again, the last interval."""
    found: dict[tuple[str, int], Interval] = {}
    begun: Event | None = None
    for event in trace.events:
        if event["name"] == "step" and event["ph"] == "B":
            begun = event
        elif event["name"] == "step" and event["ph"] == "E" and begun is not None:
            found[str(begun["args"].get("stage")), int(begun["args"]["step"])] = (begun["ts"], event["ts"])
            begun = None
    stage = next(reversed(found))[0] if found else ""
    return {step: (of, when) for (of, step), when in found.items() if of == stage}


def join(traces: Sequence[RankTrace], steps: range | None, out: Path) -> int:
    """Writes one file for Perfetto, with a row for each group of samples; returns the number of its events.

    Args:
        traces: Traces of the ranks to show.
        steps: The steps to show; None for everything in the traces, also before and after the steps.
        out: The file, which is complete or absent; compressed when its name ends in .gz.

    Raises:
        InputError: No trace has a whole step of `steps`; names the steps of the traces.
    """
    window = _window(traces, steps) if steps is not None else None
    number = 0
    with writing_atomic(out) as raw, gzip.open(raw, "wb") if out.suffix == ".gz" else nullcontext(raw) as file:
        file.write(b"[\n")
        for event in _shown(traces, window):
            file.write((b",\n" if number else b"") + json.dumps(event, separators=(",", ":")).encode())
            number += 1
        file.write(b"\n]\n")
    return number


def _window(traces: Sequence[RankTrace], steps: range) -> Interval:
    """From the beginning of the first of these steps to the end of the last one, on any rank."""
    there = [steps_of(trace) for trace in traces]
    times = [when for of_rank in there for step, (_, when) in of_rank.items() if step in steps]
    if not times:
        known = sorted({step for of_rank in there for step in of_rank})
        fix = f"choose some of {known[0]} to {known[-1]}" if known else "let the run finish a step"
        raise InputError(f"steps {steps[0]}:{steps[-1]}", "no whole step of them is in the traces", fix)
    return min(begin for begin, _ in times), max(end for _, end in times)


def _shown(traces: Sequence[RankTrace], window: Interval | None) -> Iterator[Event]:
    written = set()
    for trace in traces:
        for event in trace.events:
            if event["ph"] == "M":
                # Metadata, such as names of threads, may be in both files of a rank and has no time: it is written
                # once, whatever the window.
                line = json.dumps(event, sort_keys=True)
                if line not in written:
                    written.add(line)
                    yield event
            elif window is None or window[0] <= event["ts"] <= window[1]:
                yield event
    for event in groups(traces):
        if window is None or window[0] <= event["ts"] <= window[1]:
            yield event


def groups(traces: Sequence[RankTrace]) -> Iterator[Event]:
    """Yields an event for each group: from the submission of a prompt's samples to the end of the last, on any rank."""
    spans: dict[tuple[str, float], Interval] = {}
    for trace in traces:
        begun: dict[str, Event] = {}
        for event in trace.events:
            if event.get("cat") != "sample":
                continue
            if event["ph"] == "b":
                begun[event["id"]] = event
            elif event["ph"] == "e" and (first := begun.pop(event["id"], None)):
                prompt = event["name"].rpartition(" #")[0]
                # A prompt may come again in later steps. Ranks submit a group's samples within some milliseconds.
                key = prompt, round(first["ts"] / 1e6, 1)
                since, until = spans.get(key, (first["ts"], event["ts"]))
                spans[key] = min(since, first["ts"]), max(until, event["ts"])
    for (prompt, _), (since, until) in spans.items():
        common = {"name": prompt, "cat": "group", "id": f"{prompt} @{since}", "pid": 0, "tid": 0}
        yield {"ph": "b", "ts": since, **common}
        yield {"ph": "e", "ts": until, **common}
