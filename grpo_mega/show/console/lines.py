"""The console off a terminal: lines that stand alone, in a file among other lines and far from any header.

    step 10/80: reward 0.213, accuracy 4.7%, format 93.8%, length 18.2, clipped 0.1%, grad norm 0.412, 0.52 s, 0:05
    elapsed, 0:36 left

is one line. While a step takes longer than a minute, a line a minute says what it does, whether or not that gives signs
of life:

    after step 10/80: generate for 3:00, 1:12:05 elapsed, 8:20:00 left
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from threading import Event, RLock, Thread
from typing import TextIO

from grpo_mega.observe.waiting import QUIET, clock
from grpo_mega.show.console.columns import SECONDS, Column, column
from grpo_mega.show.console.progress import Progress

WIDTH = 120
SUPERVISED = ("sft/loss", "sft/grad_norm")


class Lines:
    """Writes to a stream that is no terminal."""

    def __init__(self, stream: TextIO, progress: Progress, columns: Sequence[Column]) -> None:
        """Will write rows of `columns`, with the times of `progress`."""
        self._stream, self._progress, self._columns = stream, progress, columns
        self._last = time.monotonic()
        self._turn = RLock()
        self._closed = Event()
        self._watch: Thread | None = None

    @property
    def width(self) -> int:
        """Largest number of characters in a line of text."""
        return WIDTH

    @property
    def lines_per_sample(self) -> int:
        """Largest number of lines of a sample."""
        return 1

    def row(self, step: int, metrics: dict[str, float]) -> None:
        """Prints a step in one line, never cut or wrapped."""
        progress = self._progress
        values = [f"{column.title} {column.text(metrics)}" for column in self._columns if column.metric != SECONDS]
        values += [f"{column.text(metrics)} s" for column in self._columns if column.metric == SECONDS]
        values.append(f"{progress.elapsed} elapsed")
        if progress.left:
            values.append(f"{progress.left} left")
        self.print(f"step {step}/{progress.total}: {', '.join(values)}")

    def count(self, step: int, metrics: dict[str, float]) -> None:
        """Prints a supervised step in one line; the base model's stage prints lines of its own."""
        columns = [column(name) for name in SUPERVISED if name in metrics]
        if columns:
            values = ", ".join(f"{each.title} {each.text(metrics)}" for each in columns)
            self.print(f"step {step}/{self._progress.total} of {self._progress.stage}: {values}")

    def forget(self) -> None:
        """Does nothing when another stage begins, as nothing is kept of the one before."""

    def remember(self, metrics: dict[str, float]) -> None:
        """Does nothing: numbers without a row are not shown."""

    def phase(self) -> None:
        """Takes notice of a phase that begins or goes on. From the first one on a thread breaks long silences."""
        if self._watch is None:
            self._watch = Thread(target=self._break_silences, name="console", daemon=True)
            self._watch.start()
        self._break_silence()

    def _break_silences(self) -> None:
        with suppress(OSError, ValueError):  # a pipe that nobody reads, or a closed file: the next row says so
            while not self._closed.wait(max(0.0, self._last + QUIET - time.monotonic())):
                self._break_silence()

    def _break_silence(self) -> None:
        """Prints which phase runs, if nothing was printed for a while."""
        with self._turn:
            if self._closed.is_set() or time.monotonic() - self._last < QUIET:
                return
            progress = self._progress
            done, needed = progress.samples
            samples = f", {done}/{needed} samples" if needed else ""
            of = f" of {progress.stage}" if progress.stage else ""
            lasts = clock(progress.phase_seconds)
            left = f", {progress.left} {'at most' if progress.stage else 'left'}" if progress.left else ""
            self.print(
                f"after step {progress.step}/{progress.total}{of}: {progress.phase} for {lasts}{samples}, "
                f"{progress.elapsed} elapsed{left}"
            )

    def alarms(self, up: Sequence[str]) -> None:
        """Does nothing: each alarm has had a line of its own."""

    def interrupt_table(self) -> None:
        """Does nothing when something is printed between two rows, as rows have no header."""

    def print(self, text: str) -> None:
        """Prints one line, however long."""
        with self._turn:
            self._stream.write(f"{text}\n")
            self._stream.flush()
            self._last = time.monotonic()

    def close(self) -> None:
        """Ends the thread that breaks silences."""
        self._closed.set()
