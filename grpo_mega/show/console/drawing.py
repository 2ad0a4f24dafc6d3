"""Draws a run as a panel: how far it and its phase are, the numbers that matter with their courses, and alarms.

    ╭─ tiny ──────────────────────────────────────────────────────────────────────╮
    │ run       ━━━━━━━━━━━━━━━━━━━──────────────────────  30/80  0:16  0:26 left │
    │ generate  ━━━━━━━━━━━━━━━──────────────────────────  12/32  0:01  0:02 left │
    │                                                                             │
    │ reward        0.213 ▁▁▂▂▃▄▅▆▆▇▇██      accuracy       4.7% ▁▁▁▂▂▃▃▄▄▅▆▇█    │
    │ length         18.2 ▇▆█▇▆▅▅▄▃▂▁▁▂      entropy       0.412 █▇▆▆▅▄▃▃▂▂▁▁▁    │
    │                                                                             │
    │ alarms: truncation since step 10                                            │
    ╰─────────────────────────────────────────────────────────────────────────────╯

The console shows it on a terminal while a run lives (`panel.py`), and `status.py` prints it once for a run directory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from grpo_mega.observe.foreign import printable
from grpo_mega.observe.waiting import clock
from grpo_mega.show.console.columns import PANEL, Column, as_shown, column, mean
from grpo_mega.show.console.progress import Standing

CELL = 36
"""Smallest width, in characters, of a number with its name and its sparkline."""
NAME, VALUE = 11, 8
NARROW = 40
"""Width of a terminal, in characters, below which bars have no times."""
BARS = "▁▂▃▄▅▆▇█"
MOST_VALUES = 256
"""Largest number of values in a sparkline; when there are more, neighbours are averaged."""


def drawn(
    standing: Standing,
    curves: Mapping[str, Sparkline],
    alarms: Sequence[str],
    width: int,
    rows: int | None = None,
    plain: bool = False,
) -> RenderableType:
    """Draws the panel of a run, `width` characters wide.

    Args:
        standing: Where the run is.
        curves: Name of a metric -> its curve; metrics that the panel does not know are left out.
        alarms: The alarms that are up, in words.
        width: Characters of a line.
        rows: Largest number of rows of numbers, the most important first; None for all.
        plain: Whether to draw in ASCII only, without sparklines.
    """
    count = max(1, (width - 4) // CELL)
    known = [curves[name] for name in PANEL if name in curves]
    shown = known if rows is None else known[: count * rows]
    name, state, phase = (printable(text, "", plain) for text in (standing.name, standing.state, standing.phase))
    standing, alarms = replace(standing, phase=phase), [printable(alarm, "", plain) for alarm in alarms]
    parts = [_bars(standing, width), *_numbers(shown, count, (width - 4) // count - 2, plain), *_alarms(alarms)]
    border = box.ASCII if plain else box.ROUNDED
    return Panel(
        Group(*parts), box=border, style="dim", width=width, title=Text(name), title_align="left",
        subtitle=Text(state) if state else None, subtitle_align="left",
    )  # fmt: skip


def remember(curves: dict[str, Sparkline], metrics: Mapping[str, float], columns: Sequence[Column] = ()) -> None:
    """Adds a step's values to the curves of the metrics that the panel shows, in the words of the table's columns."""
    for name in PANEL:
        if (value := metrics.get(name)) is not None:
            curves.setdefault(name, Sparkline(as_shown(column(name), columns))).add(value)


def _bars(at: Standing, width: int) -> RenderableType:
    """Draws the progress bars of the run and of its phase; a narrow terminal has no room for times."""
    bars = Table.grid(padding=(0, 2, 0, 0), expand=True)
    bars.add_column(no_wrap=True, style="default")
    bars.add_column(ratio=1)
    bars.add_column(no_wrap=True, justify="right", style="default")
    if times := width >= NARROW:
        bars.add_column(no_wrap=True, justify="right", style="default")
        bars.add_column(no_wrap=True, justify="right", style="default")
    left = f"{at.left} {'at most' if at.stage else 'left'}" if at.left else ""
    took = (at.elapsed, left) if times else ()
    done, share = (f"{at.step}", 0.0) if at.total is None else (f"{at.step}/{at.total}", at.step / max(at.total, 1))
    bars.add_row(at.stage or "run", _bar(share), done, *took)
    if at.phase:
        got, needed = at.samples
        left = "" if at.phase_left is None else f"{clock(at.phase_left)} left"
        took = (clock(at.phase_seconds), left) if times else ()
        bars.add_row(Text(at.phase), _bar(at.phase_share or 0.0), f"{got}/{needed}" if needed else "", *took)
    return bars


def _numbers(curves: Sequence[Sparkline], count: int, cell: int, plain: bool) -> Iterator[RenderableType]:
    """Draws the latest numbers with their sparklines, `count` in a row, each `cell` characters wide."""
    if not curves:
        return
    grid = Table.grid(padding=(0, 2, 0, 0))
    for begin in range(0, len(curves), count):
        grid.add_row(*(_number(curve, cell, plain) for curve in curves[begin : begin + count]))
    yield Text()
    yield grid


def _number(curve: Sparkline, width: int, plain: bool) -> Text:
    shown = Text(f"{curve.column.title:<{NAME}}"[:NAME], style="default")
    shown.append(f"{curve.text:>{VALUE}} ", style="bold default")
    if not plain:
        shown.append(curve.sparkline(max(width - NAME - VALUE - 1, 0)), style="cyan")
    shown.pad_right(width - len(shown))  # columns stay where they are while curves grow
    return shown


def _alarms(up: Sequence[str]) -> Iterator[RenderableType]:
    if up:
        yield Text()
        yield Text(f"alarms: {'; '.join(up)}", style="yellow", no_wrap=True, overflow="ellipsis")


def _bar(share: float) -> ProgressBar:
    return ProgressBar(1.0, share, complete_style="cyan", finished_style="cyan", style="bright_black")


class Sparkline:
    """Curve of a metric: the means of successive, equally long stretches of its values, at most `MOST_VALUES`."""

    def __init__(self, of: Column) -> None:
        """Starts the curve of a metric, without values."""
        self.column = of
        self._latest = 0.0
        self._means: list[float] = []
        self._pending: list[float] = []
        self._each = 1

    def add(self, value: float) -> None:
        """Adds the value of the next step."""
        self._latest = value
        self._pending.append(value)
        if len(self._pending) < self._each:
            return
        self._means.append(mean(self._pending))
        self._pending = []
        if len(self._means) == MOST_VALUES:
            self._means = [mean(self._means[i : i + 2]) for i in range(0, MOST_VALUES, 2)]
            self._each *= 2

    @property
    def text(self) -> str:
        """The latest value as text."""
        return self.column.text({self.column.metric: self._latest})

    def sparkline(self, width: int) -> str:
        """Sparkline of at most `width` characters; values that are not finite are blank."""
        return sparkline([*self._means, *([mean(self._pending)] if self._pending else [])], width)


def sparkline(values: Sequence[float], width: int) -> str:
    """Sparkline with a character for each value, or for each mean of neighbours if there are more than `width` values.

    Equal values are a low line.
    """
    if width < 1 or not values:
        return ""
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    means = [mean(values[a:b]) for a, b in pairwise(edges)]
    finite = [each for each in means if math.isfinite(each)]
    if not finite:
        return " " * count
    # With the largest scaled to about 1, the span is neither infinite nor so small that its inverse is.
    _, exponent = math.frexp(max(map(abs, finite)))
    heights = [math.ldexp(each, -exponent) for each in means]
    low, high = math.ldexp(min(finite), -exponent), math.ldexp(max(finite), -exponent)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((each - low) * scale)] if math.isfinite(each) else " " for each in heights)
