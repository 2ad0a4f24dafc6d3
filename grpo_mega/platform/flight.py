"""The flight recorder: what a rank began and ended last, in a file that is right whatever becomes of the process.

`flight/rank-NNNNN` of the run directory is a ring of lines of a fixed width, each overwritten in place as it happens:
after kill -9, an abort of NCCL's watchdog or a hang they are there, without anything having been asked to write them.

    number time begin|end step/update/forward-recv what-is-known-of-it
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
"""Ends the name of what the start before this one has left."""
LINES = 1024
"""Of a rank."""
WIDTH = 127
"""Bytes of a line without its newline."""

logger = logging.getLogger(__name__)


class Flight:
    """The recorder of this process; what other threads than the one that made it do is not recorded."""

    def __init__(self, path: Path, rank: int, clock: Clock) -> None:
        """Begins the file of a rank in the run directory `path`; where it cannot, a warning says so."""
        self._clock, self._number, self._open = clock, 0, list[str]()
        self._thread = threading.get_ident()
        self._file: int | None = None
        file = path / FOLDER / f"rank-{rank:05d}"
        try:
            file.parent.mkdir(exist_ok=True)
            if file.exists():
                file.replace(file.with_name(f"{file.name}{BEFORE}"))
            self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        except OSError as error:
            logger.warning("%s: %s; what this rank does last will not be known after a crash", file, error)

    def begin(self, name: str, about: dict[str, Any]) -> None:
        """Something begins inside of what is open."""
        if threading.get_ident() == self._thread:
            self._open.append(name)
            self._line("begin", about)

    def end(self, name: str) -> None:
        """What was begun last under this name ends, and with it what was begun inside of it."""
        if threading.get_ident() == self._thread and name in self._open:
            self._line("end", {})
            while self._open.pop() != name:
                pass

    def _line(self, what: str, about: dict[str, Any]) -> None:
        if self._file is None:
            return
        words = [
            f"{self._number} {self._clock.microseconds() / 1e6:.6f} {what} {'/'.join(self._open).replace(' ', '-')}"
        ]
        words += [f"{name}={value}" for name, value in about.items()]
        text = " ".join(words).encode("ascii", "replace").replace(b"\n", b" ")
        try:
            os.pwrite(self._file, text[:WIDTH].ljust(WIDTH) + b"\n", self._number % LINES * (WIDTH + 1))
        except OSError as error:
            self._file = None
            logger.warning("the flight recorder ends: %s", error)
        self._number += 1

    def close(self) -> None:
        """Closes the file, which stays."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


@dataclass(frozen=True)
class Moment:
    """A line of the recorder.

    Attributes:
        number: Of the line, from 0.
        time: Seconds since 1970.
        begins: Whether something begins; otherwise it ends.
        open: What was open, outermost first, with what begins or ends at the end.
        about: What is known of it.
    """

    number: int
    time: float
    begins: bool
    open: tuple[str, ...]
    about: str

    @property
    def inside(self) -> tuple[str, ...]:
        """What was open after it."""
        return self.open if self.begins else self.open[:-1]


def read_flight(file: Path) -> list[Moment]:
    """What a rank did last, in order; lines that are not whole are left out."""
    found = []
    for line in file.read_text("ascii", "replace").splitlines():
        words = line.split(maxsplit=4)
        try:
            number, time, what, path = int(words[0]), float(words[1]), words[2], words[3]
        except (ValueError, IndexError):
            continue
        about = words[4].rstrip() if len(words) > 4 else ""
        found.append(Moment(number, time, what == "begin", tuple(path.split("/")), about))
    return sorted(found, key=lambda moment: moment.number)
