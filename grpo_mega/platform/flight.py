"""Flight recorder: the last operations that a rank began and ended, in a file that survives any end of the process.

`flight/rank-NNNNN` of the run directory is a ring of lines of a fixed width, each overwritten in place when the event
happens, so that they exist after kill -9, an abort by NCCL's watchdog or a hang.

    number time begin|end step/update/forward-recv details
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mega.platform.clock import Clock

FOLDER = "flight"
BEFORE = ".before"
"""Suffix of the file of the previous start."""
LINES = 1024
"""Number of lines of a rank's file."""
WIDTH = 127
"""Length of a line in bytes, without its newline."""

logger = logging.getLogger(__name__)


class Flight:
    """The recorder of this process; it records only the thread that created it."""

    def __init__(self, path: Path, rank: int, clock: Clock) -> None:
        """Creates the file of a rank in the run directory `path`; a failure is a warning."""
        self._clock, self._number, self._open = clock, 0, list[str]()
        self._thread = threading.get_ident()
        self._file: int | None = None
        file = path / FOLDER / f"rank-{rank:05d}"
        try:
            file.parent.mkdir(exist_ok=True)
            if file.exists():
                # A resumed run must not overwrite the record of the crash that it resumes after.
                file.replace(file.with_name(f"{file.name}{BEFORE}"))
            self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        except OSError as error:
            logger.warning("%s: %s; what this rank does last will not be known after a crash", file, error)

    def begin(self, name: str, about: dict[str, Any]) -> None:
        """Records that an operation has begun, inside those that are open."""
        if threading.get_ident() == self._thread:
            self._open.append(name)
            self._line("begin", about)

    def end(self, name: str) -> None:
        """Records that the latest operation of this name has ended, and with it all operations inside it."""
        if threading.get_ident() == self._thread and name in self._open:
            self._line("end", {})
            # An error may have left inner operations open; they end with the one around them.
            while self._open.pop() != name:
                pass

    def _line(self, what: str, about: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            words = [
                f"{self._number} {self._clock.microseconds() / 1e6:.6f} {what} {'/'.join(self._open).replace(' ', '-')}"
            ]
            words += [f"{name}={value}" for name, value in about.items()]
            text = " ".join(words).encode("ascii", "replace").replace(b"\n", b" ")
            # One write of a fixed size at a computed offset: it needs no lock and no flush, and the page cache keeps it
            # when the process is killed.
            os.pwrite(self._file, text[:WIDTH].ljust(WIDTH) + b"\n", self._number % LINES * (WIDTH + 1))
        except Exception as error:
            # The recorder must never fail a run, e.g. when the disk is full: it stops with a warning.
            self._file = None
            logger.warning("the flight recorder ends: %s", error, exc_info=True)
        self._number += 1

    def close(self) -> None:
        """Closes the file, which is kept."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


@dataclass(frozen=True)
class Moment:
    """One event of the recorder.

    Attributes:
        number: Number of the line, from 0.
        time: Seconds since 1970.
        begins: Whether the operation begins; otherwise it ends.
        open: Open operations, outermost first, ending with the one that begins or ends.
        about: Details of the operation.
    """

    number: int
    time: float
    begins: bool
    open: tuple[str, ...]
    about: str

    @property
    def inside(self) -> tuple[str, ...]:
        """Operations that are open after the event."""
        return self.open if self.begins else self.open[:-1]


def read_flight(file: Path) -> list[Moment]:
    """Last events of a rank, in order; incomplete lines are left out."""
    found = []
    for line in file.read_text("ascii", "replace").splitlines():
        words = line.split(maxsplit=4)
        try:
            number, time, what, path = int(words[0]), float(words[1]), words[2], words[3]
        except (ValueError, IndexError):
            continue
        about = words[4].rstrip() if len(words) > 4 else ""
        found.append(Moment(number, time, what == "begin", tuple(path.split("/")), about))
    # The file is a ring: the oldest line may be anywhere.
    return sorted(found, key=lambda moment: moment.number)
