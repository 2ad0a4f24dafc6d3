"""Shows what a run does while it has no console: while libraries load, and after the console is closed.

On a terminal it is a line with a running clock, elsewhere a line a minute. The clock may stop for a moment while a
library that loads holds Python's lock.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Event, RLock, Thread
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

FRAMES_PER_SECOND = 2
QUIET = 60.0
"""The longest silence off a terminal, in seconds."""

_end: Callable[[], None] | None = None
"""Ends the line that is shown; None without one."""
_text = ""
"""What the line says."""


class OneAtATime(Console):
    """A console that serializes the prints of one thread and the frames of another.

    rich computes how far up the cursor has to go and writes it in two steps: whatever another thread printed in between
    would be overwritten or appear twice.
    """

    def __init__(self, **options: Any) -> None:
        """Takes rich's options."""
        super().__init__(**options)
        self.turn = RLock()

    def print(self, *objects: Any, **options: Any) -> None:
        """Prints once all other threads have printed."""
        with self.turn:
            super().print(*objects, **options)


def start_live(
    stream: TextIO, draw: Callable[[Console], RenderableType], transient: bool, redirect_stdout: bool
) -> Live:
    """Starts a thread that draws `draw(console)` on a terminal, below what is printed; `stop` of the result ends it.

    What others print to `stream` (and to stdout, with `redirect_stdout`), such as warnings, goes above the drawing.
    """
    console = OneAtATime(file=stream, force_terminal=True, highlight=False, markup=False, emoji=False)
    live = Live(
        get_renderable=lambda: draw(console), console=console, refresh_per_second=FRAMES_PER_SECOND,
        transient=transient, redirect_stdout=redirect_stdout, redirect_stderr=stream is sys.stderr,
        vertical_overflow="crop",
    )  # fmt: skip
    # rich holds its lock while it draws a frame; prints of other threads must wait for the same one.
    live._lock = console.turn
    live.start(refresh=True)
    # rich hides the cursor, and a killed process could not show it again.
    console.show_cursor(True)
    return live


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss; dashes when they are not finite, or thousands of years."""
    if not abs(seconds) < 1e11:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def begin(what: str, stays: bool = True) -> None:
    """Shows on standard error `what` this process does, and for how long, until `end`.

    On a terminal the line `stays` at the end or is removed.
    """
    global _end, _text
    end()
    _text = what
    began = time.monotonic()
    if sys.stderr.isatty():
        # Never wrapped, and so always one line.
        _end = start_live(
            sys.stderr,
            lambda _: Text(f"{_text}  {clock(time.monotonic() - began)}", no_wrap=True, overflow="crop"),
            transient=not stays,
            redirect_stdout=False,
        ).stop
    else:
        over = Event()

        def repeat() -> None:
            while not over.wait(QUIET):
                print(f"{_text} for {clock(time.monotonic() - began)}", file=sys.stderr, flush=True)

        Thread(target=repeat, name="waiting", daemon=True).start()
        _end = over.set
    # The line ends as well when an exception ends the process.
    atexit.register(end)


def end() -> None:
    """Ends the line that `begin` shows, if any, so that the next output starts on a clean line."""
    global _end
    if _end:
        ends, _end = _end, None
        # The terminal may have gone.
        with suppress(OSError):
            ends()


def tell(what: str) -> None:
    """Changes the text of the line, if one is shown: on a terminal in place, elsewhere by printing another line."""
    global _text
    if _end:
        _text = what
        if not sys.stderr.isatty():
            print(what, file=sys.stderr, flush=True)
