"""Trace events of this process: phases, spans inside them, samples in generation, memory, and work of other processes
for this one, as seen from here.

Any package may call `span`, `phase`, `under_way`, `beside` and `counter`; they record into the trace that `recording`
opened, and do nothing without one. A trace has two files, both usable after any end of this process:

* `trace/rank-NNNNN.json`: Chrome's JSON trace events (the "Trace Event Format" of the Chromium project), one a line, in
  an array that is never closed, which Perfetto and Chrome accept. After a number of steps it is renamed to
  `rank-NNNNN.before.json`, replacing the previous one, and a new one begins. So a run of any length leaves at least the
  newest steps, and at most twice as many.
* `flight/rank-NNNNN`: the last operations that began or ended, see `flight.py`.

Times are those of one clock for all ranks, see `clock.py`. They are the host's: work that is queued on a GPU ends
later than the span that queued it.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from types import TracebackType
from typing import Any

from grpo_mega.platform.clock import Clock
from grpo_mega.platform.flight import FOLDER as FLIGHT
from grpo_mega.platform.flight import Flight

FOLDER = "trace"
"""Folder in the run directory; the file of rank 3 is rank-00003.json, the one before it rank-00003.before.json."""
MOST_EVENTS = 20_000
"""Limit of events per step and rank; further ones except phases are only counted, to bound the size of a file."""
BUFFERED = 200
"""Number of events after which they are written. When a phase begins or ends they are written at once."""
SECONDS_BETWEEN_WRITES = 1.0

logger = logging.getLogger(__name__)

WAITS = ("wait", "reduce", "all-grads-sync")
"""Spans in which a rank waits for all others. In sends and receives of pipelines it waits for one, see
`is_wait_for_one`."""

HOLDERS = "device"
"""Counter of memory by holder of a device, such as "engine GB", recorded whenever the device changes hands."""

_encoded = json.JSONEncoder(separators=(",", ":")).encode
"""Like json.dumps, but without creating an encoder for every event."""
now = time.perf_counter_ns
"""Nanoseconds of the clock that all processes of this machine share."""


@dataclass(frozen=True)
class Process:
    """Process that the events belong to.

    Attributes:
        rank: Rank of this process.
        name: Name of its row, such as "rank 3: tp 1, pp 0".
        world_size: Number of ranks of the run.
    """

    rank: int
    name: str
    world_size: int


class Trace:
    """Trace events of this process; opened by `recording`."""

    def __init__(
        self, path: Path, process: Process, clock: Clock, keep: int, memory: Callable[[], Mapping[str, float]]
    ) -> None:
        """Creates the trace files in the run directory `path`; with `keep` 0 only the flight recorder's.

        Args:
            path: The run directory.
            process: Process that the events belong to.
            clock: Common clock of all ranks.
            keep: Number of steps in a file.
            memory: Name -> 10^9 bytes, recorded when a phase begins or ends.
        """
        self.flight = Flight(path, process.rank, clock)
        self._file = path / FOLDER / f"rank-{process.rank:05d}.json"
        self._process, self._clock, self._keep, self._memory = process, clock, keep, memory
        self._main = threading.get_ident()
        self._descriptor: int | None = None
        self._lines: list[str] = []
        # Reentrant: `write` holds the lock when a full disk makes it call `_give_up`, which takes it again.
        self._lock = threading.RLock()
        self._tracks: dict[str, int] = {}
        self._taken: set[str] = set()
        self._steps = self._events = self._left_out = 0
        self._written = now()
        # Files of ranks of an earlier, larger start are removed, as readers would wait for those ranks. By one rank
        # only, since the ranks share the folder.
        if process.rank == 0:
            for file in chain.from_iterable((path / folder).glob("rank-*") for folder in (FOLDER, FLIGHT)):
                number = file.name.removeprefix("rank-").partition(".")[0]
                if number.isdecimal() and int(number) >= process.world_size:
                    file.unlink(missing_ok=True)
        if keep:
            self._begin_file()

    @property
    def is_recorded(self) -> bool:
        """Whether there is a file of events."""
        return self._descriptor is not None

    @contextmanager
    def phase(self, name: str, /, **about: Any) -> Iterator[None]:
        """Records the start and the end of the body, with the memory in use, and writes both immediately."""
        self._edge("B", name, about)
        try:
            yield
        finally:
            self._edge("E", name, {})

    def _edge(self, kind: str, name: str, about: dict[str, Any]) -> None:
        # The flight recorder comes first, so that it has the phase even if the process dies in what follows.
        self.flight.begin(name, about) if kind == "B" else self.flight.end(name)
        if self.is_recorded:
            self.event(kind, name, now(), {"args": about} if about else {}, always=True)
            try:
                memory = dict(self._memory())
            except Exception as error:
                self._give_up(error)
                return
            self.event("C", "memory", now(), {"args": memory}, always=True)
            self.write()

    def end_step(self) -> None:
        """Ends a step; after a number of steps another file begins."""
        if self._left_out:
            self.event("i", f"{self._left_out} events of this step are left out", now(), {"s": "p"}, always=True)
        self._events = self._left_out = 0
        self._steps += 1
        if self.is_recorded and self._steps % self._keep == 0:
            self.write()
            self._begin_file()

    def event(
        self, kind: str, name: str, at: int, more: Mapping[str, Any], always: bool = False, row: str | None = None
    ) -> None:
        """Records one event that happened at `at`, a time of `now`, in the row of the calling thread or in that called
        `row`; `more` are its further fields. Thread-safe."""
        if not self.is_recorded:
            return
        self._events += 1
        # Phases and notes pass the limit, so that the structure of a step is complete however much happens in it.
        if self._events > MOST_EVENTS and not always:
            self._left_out += 1
            return
        fields = {"ph": kind, "name": name, "ts": self._clock.microseconds(at), "pid": self._process.rank}
        try:
            line = _encoded({**fields, "tid": self._track(row), **more}) + ",\n"
        except Exception as error:
            # A value that JSON cannot represent ends the trace, not the run.
            self._give_up(error)
            return
        with self._lock:
            self._lines.append(line)
        if len(self._lines) >= BUFFERED or now() - self._written > SECONDS_BETWEEN_WRITES * 1e9:
            self.write()

    def _track(self, row: str | None) -> int:
        """Number of a row, by default the calling thread's: 0 for the main thread. Pools whose threads have equal names
        share rows."""
        if row is None and threading.get_ident() == self._main:
            return 0
        name = row or threading.current_thread().name
        with self._lock:
            if name not in self._tracks:
                self._tracks[name] = 1 + len(self._tracks)
                self._lines.append(self._metadata("thread_name", self._tracks[name], name=name))
        return self._tracks[name]

    @contextmanager
    def row(self, name: str) -> Iterator[str]:
        """A row that only the body uses: `name`, or `name 2` and so on while other threads use the earlier ones."""
        with self._lock:
            free = next(row for n in count(1) if (row := f"{name} {n}" if n > 1 else name) not in self._taken)
            self._taken.add(free)
        try:
            yield free
        finally:
            with self._lock:
                self._taken.remove(free)

    def write(self) -> None:
        """Writes the recorded events; a failure is a warning, and the run continues without a trace."""
        with self._lock:
            lines, self._lines = self._lines, []
            self._written = now()
            if self._descriptor is None or not lines:
                return
            try:
                # Not synced to disk: the page cache survives the end of the process, and a trace is not worth waiting
                # for the disk.
                os.write(self._descriptor, "".join(lines).encode())
            except OSError as error:
                self._give_up(error)

    def _begin_file(self) -> None:
        """Begins a new file, keeping the current one as the previous."""
        # Locked: otherwise another thread may write into whatever file gets the number of the closed descriptor.
        with self._lock:
            try:
                self._end_file()
                self._file.parent.mkdir(exist_ok=True)
                if self._file.exists():
                    self._file.replace(self._file.with_suffix(".before.json"))
                self._descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
            except OSError as error:
                self._give_up(error)
                return
        process = self._process
        head = [
            "[\n",
            self._metadata("process_name", 0, name=process.name),
            self._metadata("process_sort_index", 0, sort_index=process.rank),
            self._metadata("thread_name", 0, name="phases"),
            self._metadata("clock", 0, error_us=self._clock.error_us, world_size=process.world_size),
            *(self._metadata("thread_name", track, name=name) for name, track in self._tracks.items()),
        ]
        with self._lock:
            # Events that other threads have recorded meanwhile come after the head, which must be first in the file.
            self._lines = head + self._lines
        self.write()

    def _metadata(self, what: str, track: int, **about: Any) -> str:
        """A line of metadata."""
        return json.dumps({"ph": "M", "name": what, "pid": self._process.rank, "tid": track, "args": about}) + ",\n"

    def _end_file(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _give_up(self, error: Exception) -> None:
        with self._lock:
            with suppress(OSError):
                self._end_file()
            self._descriptor = None
        logger.warning("%s: %s; the run goes on, and its trace ends here", self._file, error, exc_info=True)

    def close(self) -> None:
        """Completes the files."""
        with self._lock:
            self.write()
            self._end_file()
        self.flight.close()


_trace: Trace | None = None
_waited = 0.0


@contextmanager
def recording(trace: Trace) -> Iterator[None]:
    """Makes this the trace of the process, and closes it at the end of the block."""
    global _trace
    _trace = trace
    try:
        yield
    finally:
        _trace = None
        trace.close()


def _forget() -> None:
    """Drops the trace in a fork, such as one that writes a checkpoint, which is not the rank."""
    global _trace
    _trace = None


os.register_at_fork(after_in_child=_forget)


@contextmanager
def phase(name: str, /, **about: Any) -> Iterator[None]:
    """Records the body as a phase or a step, also for the flight recorder."""
    if _trace is None:
        yield
        return
    with _trace.phase(name, **about):
        yield


@contextmanager
def step(number: int, stage: str) -> Iterator[None]:
    """Records the body as a step of a stage."""
    if _trace is None:
        yield
        return
    trace = _trace
    with trace.phase("step", step=number, stage=stage):
        yield
    trace.end_step()


def is_wait_for_one(name: str) -> bool:
    """Whether a span of this name is a pipeline's send or receive."""
    return "recv" in name or name.endswith("-send")


def waited() -> float:
    """Seconds that this process has waited for other ranks, counted even without a trace."""
    return _waited


class span:
    """Records the body of `with span("optimizer"):`, or the time between `start` and `stop`, inside a phase.

    Threads have their own rows. Spans ended by an error or a stop are recorded too.
    """

    __slots__ = ("about", "name", "since")

    # A class and not a generator with @contextmanager: spans are frequent, and Megatron calls start and stop as on its
    # own timers.
    def __init__(self, name: str, /, **about: Any) -> None:
        self.name, self.about, self.since = name, about, 0

    def start(self, *_: Any, **__: Any) -> None:
        """Begins the span; arguments such as Megatron's `barrier` have no effect."""
        self.since = now()
        if _trace is not None:
            _trace.flight.begin(self.name, self.about)

    def stop(self, *_: Any, **__: Any) -> None:
        """Ends the span."""
        global _waited
        spent = now() - self.since
        # Counted without a trace too, since the metrics of every step subtract it from a rank's working time.
        if self.name in WAITS or is_wait_for_one(self.name):
            _waited += spent / 1e9
        if _trace is None:
            return
        _trace.flight.end(self.name)
        took: dict[str, Any] = {"dur": spent / 1e3}
        _trace.event("X", self.name, self.since, took | ({"args": self.about} if self.about else {}))

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


def under_way(kind: str, name: str, since: int, /, **about: Any) -> None:
    """Records an activity outside the phases, such as an engine's sample, from `since`, a time of `now`, until now."""
    if _trace is None:
        return
    # Activities of the same name may overlap; viewers pair begin and end by this id.
    common = {"cat": kind, "id": f"{name} @{since}"}
    _trace.event("b", name, since, {**common, "args": about})
    _trace.event("e", name, now(), common)


@contextmanager
def beside(row: str, name: str, /, **about: Any) -> Iterator[dict[str, Any]]:
    """Records the body as work of another process for this one, in a row of that process (`Trace.row`).

    The body receives a dictionary; whatever it adds to it is recorded too.
    """
    if _trace is None:
        yield about
        return
    with _trace.row(row) as free:
        since = now()
        try:
            yield about
        finally:
            record_beside(free, name, since, **about)


def record_beside(row: str, name: str, since: int, /, **about: Any) -> None:
    """Records work of another process for this one, from `since`, a time of `now`, until now, in the row `row`."""
    if _trace is not None:
        _trace.event("X", name, since, {"dur": (now() - since) / 1e3, "args": about}, row=row)


def counter(name: str, /, **values: float) -> None:
    """Records values that vary over time, such as memory by holder, as curves in one diagram."""
    if _trace is not None:
        _trace.event("C", name, now(), {"args": values})
