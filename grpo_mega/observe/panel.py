"""The console on a terminal: a panel at the bottom that is never silent, above it a table and whatever else is said.

    ╭─ tiny ──────────────────────────────────────────────────────────────────────╮
    │ run       ━━━━━━━━━━━━━━━━━━━──────────────────────  30/80  0:16  0:26 left │
    │ generate  ━━━━━━━━━━━━━━━──────────────────────────  12/32  0:01  0:02 left │
    │                                                                             │
    │ reward        0.213 ▁▁▂▂▃▄▅▆▆▇▇██      accuracy       4.7% ▁▁▁▂▂▃▃▄▄▅▆▇█    │
    │ length         18.2 ▇▆█▇▆▅▅▄▃▂▁▁▂      entropy       0.412 █▇▆▆▅▄▃▃▂▂▁▁▁    │
    │                                                                             │
    │ alarms: truncation since step 10                                            │
    ╰─────────────────────────────────────────────────────────────────────────────╯

A thread draws it twice a second, so that its clocks go on whatever the run is doing. Sparklines are of all steps since
the stage was begun or continued. Every line fits into the terminal, and the panel is gone when the run ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean
from typing import TextIO

from rich import box
from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from grpo_mega.observe.columns import PANEL, Column, clock, column
from grpo_mega.observe.progress import Progress

FRAMES_PER_SECOND = 2
ROWS_PER_HEADER = 20
STEP_WIDTH = 8
CELL = 36
"""Least characters of a number with its name and its sparkline."""
NAME, VALUE = 11, 8
NARROW = 40
"""Characters of a terminal below which bars have no times."""
BARS = "▁▂▃▄▅▆▇█"
MOST_VALUES = 256
"""Of a sparkline; when there are more, neighbours are averaged."""


class LivePanel:
    """Writes to a terminal."""

    def __init__(self, stream: TextIO, progress: Progress, columns: Sequence[Column]) -> None:
        """Begins to draw; rows have `columns`, as many as fit, and the panel shows `progress`."""
        self._stream, self._progress, self._columns = stream, progress, columns
        self._curves: dict[str, Curve] = {}
        self._up: Sequence[str] = ()
        self._rows_until_header = 0
        self._console = Console(file=stream, force_terminal=True, highlight=False, markup=False, emoji=False)
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
        self._live.start(refresh=True)
        self._console.show_cursor(True)  # which a killed process could not give back

    @property
    def width(self) -> int:
        """Most characters in a line. The last column is not used, because some terminals wrap there."""
        return self._size()[0]

    @property
    def lines_per_sample(self) -> int:
        """Most lines that a sample takes: a third of the terminal."""
        return max(self._size()[1] // 3, 1)

    def _size(self) -> tuple[int, int]:
        columns, lines = os.get_terminal_size(self._stream.fileno())
        return (columns or 80) - 1, lines or 24

    def row(self, step: int, metrics: dict[str, float]) -> None:
        """A step as a line of the table, which has a header now and then."""
        if self._rows_until_header == 0:
            cells = [(each.title, each.width) for each in self._columns]
            self.print(_fitting(f"{'step':>{STEP_WIDTH}}", cells, self.width))
            self._rows_until_header = ROWS_PER_HEADER
        self.print(
            _fitting(f"{step:>{STEP_WIDTH}}", [(each.text(metrics), each.width) for each in self._columns], self.width)
        )
        self._rows_until_header -= 1

    def forget(self) -> None:
        """Another stage begins: the curves of the one before are gone."""
        self._curves = {}

    def remember(self, metrics: dict[str, float]) -> None:
        """A step that may have no row: the panel shows its numbers."""
        for name in PANEL:
            if (value := metrics.get(name)) is not None:
                self._curves.setdefault(name, Curve(column(name))).add(value)

    def phase(self) -> None:
        """A phase begins or goes on; the next frame shows it."""

    def alarms(self, up: Sequence[str]) -> None:
        """The alarms that are up, in words."""
        self._up = tuple(up)

    def interrupt_table(self) -> None:
        """Something else was printed between two rows: the next one has a header."""
        self._rows_until_header = 0

    def print(self, text: str) -> None:
        """Text above the panel, as it is."""
        self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Removes the panel, so that the next output starts on a clean line."""
        self._live.stop()

    # The panel, drawn by a thread.

    def _drawn(self) -> RenderableType:
        width, lines = self._size()
        self._console.size = ConsoleDimensions(width, lines)
        known = self._curves.copy()
        curves = [known[name] for name in PANEL if name in known][: self._room(width, lines)]
        parts = [self._bars(width), *self._numbers(curves, width), *self._alarms()]
        border = box.ASCII if self._plain else box.ROUNDED
        return Panel(Group(*parts), box=border, title=Text(self._progress.name), title_align="left", style="dim")

    def _room(self, width: int, lines: int) -> int:
        """How many numbers fit into a panel of half the terminal's height."""
        return self._per_row(width) * max(0, lines // 2 - 4)

    def _per_row(self, width: int) -> int:
        return max(1, (width - 4) // CELL)

    def _bars(self, width: int) -> RenderableType:
        """How far the run is, and its phase; a narrow terminal has no room for times."""
        progress = self._progress
        bars = Table.grid(padding=(0, 2, 0, 0), expand=True)
        bars.add_column(no_wrap=True, style="default")
        bars.add_column(ratio=1)
        bars.add_column(no_wrap=True, justify="right", style="default")
        if times := width >= NARROW:
            bars.add_column(no_wrap=True, justify="right", style="default")
            bars.add_column(no_wrap=True, justify="right", style="default")
        left = f"{progress.left} {'at most' if progress.stage else 'left'}" if progress.left else ""
        took = (progress.elapsed, left) if times else ()
        done = f"{progress.step}/{progress.total}"
        bars.add_row(progress.stage or "run", _bar(progress.step / max(progress.total, 1)), done, *took)
        if progress.phase:
            (got, needed), rest = progress.samples, progress.phase_left
            left = "" if rest is None else f"{clock(rest)} left"
            took = (clock(progress.phase_seconds), left) if times else ()
            done = f"{got}/{needed}" if needed else ""
            bars.add_row(progress.phase, _bar(progress.phase_share or 0.0), done, *took)
        return bars

    def _numbers(self, curves: Sequence[Curve], width: int) -> Iterator[RenderableType]:
        """The latest numbers with their sparklines, in columns."""
        if not curves:
            return
        count = self._per_row(width)
        cell = (width - 4) // count - 2
        grid = Table.grid(padding=(0, 2, 0, 0))
        for begin in range(0, len(curves), count):
            grid.add_row(*(self._number(curve, cell) for curve in curves[begin : begin + count]))
        yield Text()
        yield grid

    def _number(self, curve: Curve, width: int) -> Text:
        shown = Text(f"{curve.column.title:<{NAME}}"[:NAME], style="default")
        shown.append(f"{curve.text:>{VALUE}} ", style="bold default")
        if not self._plain:
            shown.append(curve.sparkline(max(width - NAME - VALUE - 1, 0)), style="cyan")
        shown.pad_right(width - len(shown))  # columns stay where they are while curves grow
        return shown

    def _alarms(self) -> Iterator[RenderableType]:
        if self._up:
            yield Text()
            yield Text(f"alarms: {'; '.join(self._up)}", style="yellow", no_wrap=True, overflow="ellipsis")


def _leave_the_panel() -> None:
    """A fork, such as one that writes a checkpoint, prints past the panel, whose locks another thread may have held."""
    if isinstance(sys.stdout, FileProxy):
        sys.stdout = sys.stdout.rich_proxied_file
    if isinstance(sys.stderr, FileProxy):
        sys.stderr = sys.stderr.rich_proxied_file


os.register_at_fork(after_in_child=_leave_the_panel)


class Curve:
    """The values of a metric since it was first seen, no more than `MOST_VALUES`, each the mean of equally many."""

    def __init__(self, of: Column) -> None:
        """Of a metric of which nothing is known yet."""
        self.column = of
        self._latest = 0.0
        self._means: list[float] = []
        self._pending: list[float] = []
        self._each = 1

    def add(self, value: float) -> None:
        """The value of the next step."""
        self._latest = value
        self._pending.append(value)
        if len(self._pending) < self._each:
            return
        self._means.append(fmean(self._pending))
        self._pending = []
        if len(self._means) == MOST_VALUES:
            self._means = [fmean(self._means[i : i + 2]) for i in range(0, MOST_VALUES, 2)]
            self._each *= 2

    @property
    def text(self) -> str:
        """The latest value."""
        return self.column.text({self.column.metric: self._latest})

    def sparkline(self, width: int) -> str:
        """At most so many characters, from the lowest value to the highest; values that are not finite are blank."""
        return sparkline([*self._means, *([fmean(self._pending)] if self._pending else [])], width)


def sparkline(values: Sequence[float], width: int) -> str:
    """A character for each value, or for the mean of as many as there are too many; equal values are a low line."""
    if width < 1 or not values:
        return ""
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    means = [fmean(values[a:b]) for a, b in pairwise(edges)]
    finite = [mean for mean in means if abs(mean) < float("inf")]
    if not finite:
        return " " * count
    low, high = min(finite), max(finite)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] if abs(mean) < float("inf") else " " for mean in means)


def _bar(share: float) -> ProgressBar:
    return ProgressBar(1.0, share, complete_style="cyan", finished_style="cyan", style="bright_black")


def _fitting(line: str, cells: list[tuple[str, int]], width: int) -> str:
    """The line and as many right-aligned cells as fit into the width."""
    for text, cell_width in cells:
        if len(line) + cell_width > width:
            break
        line += f"{text:>{cell_width}}"
    return line[:width]
