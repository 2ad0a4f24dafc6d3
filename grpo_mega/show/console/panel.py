"""The console on a terminal: a panel (`drawing.py`) at the bottom, above it a table and whatever else is printed.

A thread draws the panel twice a second, so that its clocks go on whatever the run is doing. Sparklines show all steps
since the stage was begun or continued. Every line fits into the terminal, and the panel is gone when the run ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TextIO

from rich.console import ConsoleDimensions, RenderableType
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.text import Text

from grpo_mega.observe.waiting import FRAMES_PER_SECOND, OneAtATime
from grpo_mega.show.console.columns import Column
from grpo_mega.show.console.drawing import Sparkline, drawn, remember
from grpo_mega.show.console.progress import Progress

ROWS_PER_HEADER = 20
STEP_WIDTH = 8


class LivePanel:
    """Writes to a terminal, with a panel below what is printed."""

    def __init__(self, stream: TextIO, progress: Progress, columns: Sequence[Column]) -> None:
        """Begins to draw; rows have the first `columns` that fit, and the panel shows `progress`."""
        self._stream, self._progress, self._columns = stream, progress, columns
        self._curves: dict[str, Sparkline] = {}
        self._up: Sequence[str] = ()
        self._rows_until_header = 0
        self._console = OneAtATime(file=stream, force_terminal=True, highlight=False, markup=False, emoji=False)
        self._plain = "utf" not in (stream.encoding or "utf").lower()
        self._live = Live(
            get_renderable=self._drawn,
            console=self._console,
            refresh_per_second=FRAMES_PER_SECOND,
            transient=True,
            # What others print, such as warnings, goes above the panel; what is not for this terminal stays what it is.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=stream is sys.stderr,
            vertical_overflow="crop",
        )
        self._live._lock = self._console.turn  # the lock under which frames are drawn
        self._live.start(refresh=True)
        self._console.show_cursor(True)  # a killed process could not show it again

    @property
    def width(self) -> int:
        """Largest number of characters in a line. The last column is not used, because some terminals wrap there."""
        return self._size()[0]

    @property
    def lines_per_sample(self) -> int:
        """Largest number of lines of a sample: a third of the terminal."""
        return max(self._size()[1] // 3, 1)

    def _size(self) -> tuple[int, int]:
        columns, lines = os.get_terminal_size(self._stream.fileno())
        return (columns or 80) - 1, lines or 24

    def row(self, step: int, metrics: dict[str, float]) -> None:
        """Prints a step as a row of the table, whose header is repeated now and then."""
        if self._rows_until_header == 0:
            cells = [(each.title, each.width) for each in self._columns]
            self.print(_fitting(f"{'step':>{STEP_WIDTH}}", cells, self.width))
            self._rows_until_header = ROWS_PER_HEADER
        self.print(
            _fitting(f"{step:>{STEP_WIDTH}}", [(each.text(metrics), each.width) for each in self._columns], self.width)
        )
        self._rows_until_header -= 1

    def forget(self) -> None:
        """Removes the curves when another stage begins."""
        self._curves = {}

    def count(self, step: int, metrics: dict[str, float]) -> None:
        """Does nothing: the panel shows the step and its numbers."""

    def remember(self, metrics: dict[str, float]) -> None:
        """Shows numbers in the panel, also those of a step without a row."""
        remember(self._curves, metrics, self._columns)

    def phase(self) -> None:
        """Does nothing when a phase begins or goes on: the next frame shows it."""

    def alarms(self, up: Sequence[str]) -> None:
        """Shows the alarms that are up, in words."""
        self._up = tuple(up)

    def interrupt_table(self) -> None:
        """Gives the next row a header, as something else was printed after the last one."""
        self._rows_until_header = 0

    def print(self, text: str) -> None:
        """Prints text above the panel, unchanged."""
        self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Removes the panel, so that the next output starts on a clean line."""
        self._live.stop()

    # The panel, drawn by a thread.

    def _drawn(self) -> RenderableType:
        """The panel, in at most half the terminal's height."""
        width, lines = self._size()
        self._console.size = ConsoleDimensions(width, lines)
        rows = max(0, lines // 2 - 4)
        return drawn(self._progress.standing, self._curves.copy(), self._up, width, rows, self._plain)


def _leave_the_panel() -> None:
    """Makes a forked process, such as one that writes a checkpoint, print past the panel, as its locks may be held."""
    if isinstance(sys.stdout, FileProxy):
        sys.stdout = sys.stdout.rich_proxied_file
    if isinstance(sys.stderr, FileProxy):
        sys.stderr = sys.stderr.rich_proxied_file


os.register_at_fork(after_in_child=_leave_the_panel)


def _fitting(line: str, cells: list[tuple[str, int]], width: int) -> str:
    """The line, followed by the right-aligned cells that fit into the width."""
    for text, cell_width in cells:
        if len(line) + cell_width > width:
            break
        line += f"{text:>{cell_width}}"
    return line[:width]
