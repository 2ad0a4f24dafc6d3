"""A terminal for tests: what a program writes to it, and what its screen shows after every frame."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TextIO

CONTROL = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|\r|\n|[^\x1b\r\n]+")


def on_a_terminal(
    columns: int,
    body: Callable[[TextIO], None],
    lines: int = 24,
    encoding: str = "utf-8",
    watch: Callable[[str], None] = lambda part: None,
) -> str:
    """Everything `body` writes to a terminal of that size; `watch` is told of each part as it comes."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    with ThreadPoolExecutor(1) as reader:
        output = reader.submit(read_to_the_end, master, watch)
        with os.fdopen(slave, "w", encoding=encoding) as stream:
            body(stream)
        return output.result().decode(encoding)


def read_to_the_end(master: int, watch: Callable[[str], None]) -> bytes:
    """All bytes until the other side of the terminal is closed, which reads as an input/output error."""
    parts = []
    with os.fdopen(master, "rb", buffering=0) as terminal, suppress(OSError):
        while part := terminal.read(65536):
            parts.append(part)
            watch(part.decode(errors="ignore"))
    return b"".join(parts)


class Screen:
    """The lines that a terminal of any height shows, what has scrolled away included.

    Attributes:
        lines: From the top down to the cursor.
        frames: All lines, as they were whenever the cursor was about to be moved up after something was written.
        cursor_shown: Whether the cursor can be seen.
    """

    def __init__(self, output: str) -> None:
        """After this was written to it.

        Raises:
            ValueError: Something was written that it does not know.
        """
        self.lines, self.frames, self.cursor_shown = [""], [], True
        self._row = self._column = 0
        self._written = False
        at = 0
        while at < len(output):
            match = CONTROL.match(output, at)
            if match is None:
                raise ValueError(f"a terminal gets {output[at : at + 20]!r}")
            self._write(match)
            at = match.end()
        assert not any(self.lines[self._row + 1 :]), "something is left below the cursor"
        del self.lines[self._row + 1 :]

    def _write(self, match: re.Match[str]) -> None:
        text, (number, command) = match[0], match.groups()
        if text == "\r":
            self._column = 0
        elif text == "\n":
            self._row += 1  # a terminal's driver adds "\r"
            self.lines += [""] * (self._row + 1 - len(self.lines))
        elif command is None:
            line = self.lines[self._row].ljust(self._column)
            self.lines[self._row] = line[: self._column] + text + line[self._column + len(text) :]
            self._column += len(text)
            self._written = True
        elif command == "A":
            if self._written:
                self.frames.append([line.rstrip() for line in self.lines])
            self._written = False
            self._row -= int(number or 1)
        elif command == "K":
            self.lines[self._row] = "" if number == "2" else self.lines[self._row][: self._column]
        elif command in "hl" and number == "?25":
            self.cursor_shown = command == "h"
        elif command != "m":
            raise ValueError(f"a terminal gets {text!r}")
