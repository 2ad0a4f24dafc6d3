"""Draws a run as a panel: its step and phase, the numbers that matter with their sparklines, and alarms.

    ╭─ tiny ──────────────────────────────────────────────────────────────────────╮
    │ run       ━━━━━━━━━━━━━━━━━━━──────────────────────  30/80  0:16  0:26 left │
    │ generate  ━━━━━━━━━━━━━━━──────────────────────────  12/32  0:01  0:02 left │
    │                                                                             │
    │ reward        0.213 ▁▁▂▂▃▄▅▆▆▇▇██      accuracy       4.7% ▁▁▁▂▂▃▃▄▄▅▆▇█    │
    │ length         18.2 ▇▆█▇▆▅▅▄▃▂▁▁▂      entropy       0.412 █▇▆▆▅▄▃▃▂▂▁▁▁    │
    │                                                                             │
    │ alarms: truncation since step 10                                            │
    ╰─────────────────────────────────────────────────────────────────────────────╯

The console keeps it on a terminal while a run lives (`console.py`), and `status.py` prints it once for a run directory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

RECENT = 20
"""Number of steps, and of occurrences of a phase, from which the time left is estimated."""
CELL = 36
"""Smallest width, in characters, of a number with its name and its sparkline."""
NAME, VALUE = 11, 8
NARROW = 40
"""Width of a terminal, in characters, below which bars have no times."""
BARS = "▁▂▃▄▅▆▇█"
MOST_VALUES = 256
"""Largest number of values in a sparkline; when there are more, neighbours are averaged."""


@dataclass(frozen=True)
class Snapshot:
    """Progress of a run at a moment.

    Attributes:
        name: Name of the run.
        stage: The running stage; empty for the last one.
        step: Number of finished steps of the stage.
        total: Largest number of steps of the stage; None if unknown.
        elapsed: The time of the run so far, in words.
        left: The time that the stage's remaining steps will take, in words; empty if unknown.
        phase: The running phase; empty between phases.
        phase_seconds: Seconds that the phase has taken in this step.
        phase_share: Finished share of the phase, from 0 to 1; None if unknown.
        phase_left: Seconds that the phase will still take; None if unknown.
        samples: Numbers of finished and of needed samples of the phase; (0, 0) for a phase without samples.
        state: How the run ended or when it last gave a sign of life, in words; empty while the run shows itself.
    """

    name: str
    stage: str
    step: int
    total: int | None
    elapsed: str
    left: str
    phase: str = ""
    phase_seconds: float = 0.0
    phase_share: float | None = None
    phase_left: float | None = None
    samples: tuple[int, int] = (0, 0)
    state: str = ""

    @property
    def time_left(self) -> str:
        """`left` with its qualifier: an earlier stage may end before its last step."""
        return f"{self.left} {'at most' if self.stage else 'left'}" if self.left else ""


def draw_panel(
    at: Snapshot,
    curves: Mapping[str, Sparkline],
    alarms: Sequence[str],
    width: int,
    rows: int | None = None,
    plain: bool = False,
) -> RenderableType:
    """Draws the panel of a run, `width` characters wide.

    Args:
        at: Progress of the run.
        curves: Name of a metric -> its curve; metrics that the panel does not show are left out.
        alarms: The alarms that are up, in words.
        width: Characters of a line.
        rows: Largest number of rows of numbers, the most important first; None for all.
        plain: Whether to draw in ASCII only, without sparklines.
    """
    per_row = max(1, (width - 4) // CELL)
    known = [curves[name] for name in PANEL if name in curves]
    shown = known if rows is None else known[: per_row * rows]
    parts: list[RenderableType] = [_bars(at, width, plain)]
    if shown:
        numbers = Table.grid(padding=(0, 2, 0, 0))
        for first in range(0, len(shown), per_row):
            cell = (width - 4) // per_row - 2
            numbers.add_row(*(curve.draw(cell, plain) for curve in shown[first : first + per_row]))
        parts += [Text(), numbers]
    if alarms:
        text = f"alarms: {'; '.join(printable(alarm, '', plain) for alarm in alarms)}"
        parts += [Text(), Text(text, style="yellow", no_wrap=True, overflow="ellipsis")]
    name, state = (printable(text, "", plain) for text in (at.name, at.state))
    return Panel(
        Group(*parts), box=box.ASCII if plain else box.ROUNDED, style="dim", width=width, title=Text(name),
        title_align="left", subtitle=Text(state) if state else None, subtitle_align="left",
    )  # fmt: skip


def _bars(at: Snapshot, width: int, plain: bool) -> RenderableType:
    """Draws the progress bars of the run and of its phase; a narrow terminal has no room for times.

    rich.progress.Progress does not fit: it estimates from a clock of this process, and `status.py` draws other ones.
    """
    bars = Table.grid(padding=(0, 2, 0, 0), expand=True)
    bars.add_column(no_wrap=True, style="default")
    bars.add_column(ratio=1)
    for _ in range(3 if width >= NARROW else 1):
        bars.add_column(no_wrap=True, justify="right", style="default")

    def add(name: str, share: float, *texts: str) -> None:
        bar = ProgressBar(1.0, share, complete_style="cyan", finished_style="cyan", style="bright_black")
        bars.add_row(Text(printable(name, "", plain)), bar, *(texts if width >= NARROW else texts[:1]))

    of_total, share = (f"{at.step}", 0.0) if at.total is None else (f"{at.step}/{at.total}", at.step / max(at.total, 1))
    add(at.stage or "run", share, of_total, at.elapsed, at.time_left)
    if at.phase:
        done, needed = at.samples
        left = "" if at.phase_left is None else f"{clock(at.phase_left)} left"
        add(at.phase, at.phase_share or 0.0, f"{done}/{needed}" if needed else "", clock(at.phase_seconds), left)
    return bars


class Sparkline:
    """Curve of a metric: the means of successive, equally long stretches of its values, at most `MOST_VALUES`."""

    def __init__(self, of: Column) -> None:
        """Starts the curve of a metric, without values."""
        self.column = of
        self._latest = 0.0
        self._means: list[float] = []
        self._pending: list[float] = []
        self._stretch = 1

    def add(self, value: float) -> None:
        """Adds the value of the next step."""
        self._latest = value
        self._pending.append(value)
        if len(self._pending) < self._stretch:
            return
        self._means.append(mean(self._pending))
        self._pending = []
        if len(self._means) == MOST_VALUES:
            self._means = [mean(self._means[i : i + 2]) for i in range(0, MOST_VALUES, 2)]
            self._stretch *= 2

    def draw(self, width: int, plain: bool) -> Text:
        """The metric's name, latest value and sparkline, `width` characters wide."""
        shown = Text(f"{self.column.title:<{NAME}}"[:NAME], style="default")
        shown.append(f"{self.column.text({self.column.metric: self._latest}):>{VALUE}} ", style="bold default")
        if not plain:
            shown.append(self.sparkline(max(width - NAME - VALUE - 1, 0)), style="cyan")
        # Padded, so that columns stay in place while curves grow.
        shown.pad_right(width - len(shown))
        return shown

    def sparkline(self, width: int) -> str:
        """Sparkline of at most `width` characters; values that are not finite are blank."""
        return sparkline([*self._means, *([mean(self._pending)] if self._pending else [])], width)


def extend_curves(curves: dict[str, Sparkline], metrics: Mapping[str, float], columns: Sequence[Column] = ()) -> None:
    """Adds a step's values to the curves of the metrics that the panel shows, in the words of the table's columns."""
    for name in PANEL:
        if (value := metrics.get(name)) is not None:
            curves.setdefault(name, Sparkline(as_shown(column(name), columns))).add(value)


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
