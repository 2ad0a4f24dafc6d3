"""Shows what a run does while it has no console: while libraries are loaded, and after the console is closed.

On a terminal it is a line whose clock goes on, elsewhere a line a minute. A library that is loaded may hold the clock
up for a moment, as it holds Python's lock.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Event, RLock, Thread
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

FRAMES_PER_SECOND = 2
QUIET = 60.0
"""The longest silence off a terminal, in seconds."""

_end: Callable[[], None] | None = None
"""Ends the line that is shown; None while there is none."""


_what = ""
"""What the line says."""


class OneAtATime(Console):
    """A console on which a line of one thread and a frame of another come one after the other. rich computes how far up
    the cursor has to go, and writes it, in two steps: what is printed in between would be overwritten, or stay twice.
    """

    def __init__(self, **options: Any) -> None:
        """A console with rich's options."""
        super().__init__(**options)
        self.turn = RLock()

    def print(self, *objects: Any, **options: Any) -> None:
        """Prints once all other threads have printed."""
        with self.turn:
            super().print(*objects, **options)


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
    global _end, _what
    end()
    _what = what
    _end = _on_terminal(stays) if sys.stderr.isatty() else _in_lines()
    atexit.register(end)  # also when an exception ends the process


def end() -> None:
    """Ends the line that `begin` shows, if any, so that the next output starts on a clean line."""
    global _end
    if _end:
        ends, _end = _end, None
        with suppress(OSError):  # a terminal that has gone
            ends()


def tell(what: str) -> None:
    """Changes what the line says, if there is one: on a terminal in its place, elsewhere in a further line."""
    global _what
    if _end:
        _what = what
        if not sys.stderr.isatty():
            print(what, file=sys.stderr, flush=True)


def _on_terminal(stays: bool) -> Callable[[], None]:
    """Begins to draw; returns the function that ends it."""
    began = time.monotonic()
    # What others print, such as warnings, goes above the line. It is never wrapped, and so always one line.
    console = OneAtATime(file=sys.stderr, force_terminal=True, highlight=False, markup=False, emoji=False)
    live = Live(
        get_renderable=lambda: Text(f"{_what}  {clock(time.monotonic() - began)}", no_wrap=True, overflow="crop"),
        console=console,
        refresh_per_second=FRAMES_PER_SECOND,
        transient=not stays,
        redirect_stdout=False,
    )
    live._lock = console.turn  # the lock under which frames are drawn
    live.start(refresh=True)
    console.show_cursor(True)  # a killed process could not show it again
    return live.stop


def _in_lines() -> Callable[[], None]:
    """Begins to print; returns the function that ends it."""
    began, over = time.monotonic(), Event()

    def repeat() -> None:
        while not over.wait(QUIET):
            print(f"{_what} for {clock(time.monotonic() - began)}", file=sys.stderr, flush=True)

    Thread(target=repeat, name="waiting", daemon=True).start()
    return over.set
