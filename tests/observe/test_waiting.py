"""What is shown while there is no console: a line a minute, on a terminal one that makes way for what comes next."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import pytest
from limits import limit
from ranks import REPOSITORY
from terminal import Screen, on_a_terminal

from grpo_mega.observe import waiting
from grpo_mega.show.console.console import Console


class Heard(io.StringIO):
    """A stream that is no terminal; `line` is set when it gets one."""

    def __init__(self) -> None:
        super().__init__()
        self.line = threading.Event()

    def flush(self) -> None:
        super().flush()
        if self.getvalue().endswith("\n"):
            self.line.set()


def test_off_a_terminal_it_says_now_and_then_what_it_does_and_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Heard()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(waiting, "QUIET", 0.01)
    waiting.begin("it is starting")
    assert stream.line.wait(limit(60))
    waiting.end()
    assert re.match(r"it is starting for \d+:\d\d\n", stream.getvalue())


def test_off_a_terminal_nothing_is_said_in_the_first_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := Heard())
    waiting.begin("it is starting")
    waiting.end()
    assert stream.getvalue() == ""


def test_a_terminal_that_has_gone_is_no_error_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    stream = os.fdopen(slave, "w")
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(waiting, "FRAMES_PER_SECOND", 0.01)  # no thread draws meanwhile
    waiting.begin("it is starting")
    os.close(master)
    waiting.end()
    with suppress(OSError):
        stream.close()


def test_a_phase_without_signs_of_life_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_mega.show.console.console.QUIET", 0.01)
    stream = Heard()
    console = Console(8, Path("tiny"), 1, stream=stream)
    console.phase("checkpoint")
    assert stream.line.wait(limit(60))
    console.close()
    assert re.match(r"after step 0/8: checkpoint for \d+:\d\d, \d+:\d\d elapsed\n", stream.getvalue())


def test_on_a_terminal_the_line_makes_way_for_warnings_and_for_the_console(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(stream: TextIO) -> None:
        monkeypatch.setattr(sys, "stderr", stream)
        waiting.begin("it is starting")
        print("a warning", file=sys.stderr)
        console = Console(8, Path("tiny"), 1, stream=stream)
        console.note("the first line")
        console.close()
        assert sys.stderr is stream
        waiting.begin("it ends", stays=False)
        waiting.end()

    screen = Screen(on_a_terminal(60, start))
    warning, line, *rest = screen.lines
    assert warning == "a warning"
    assert re.fullmatch(r"it is starting  \d+:\d\d", line)
    assert rest == ["the first line", ""]
    assert screen.cursor_shown


ENDS = {"an error": "raise SystemExit('an error')", "bad input": "leave('bad input', 2)"}


@pytest.mark.parametrize("how", [*ENDS])
def test_whatever_ends_the_process_leaves_the_terminal_clean(how: str) -> None:
    program = (
        "from grpo_mega.observe import waiting; from grpo_mega.observe.launcher import leave; "
        f"waiting.begin('it is starting'); {ENDS[how]}"
    )

    def end(stream: TextIO) -> None:
        own = {"PYTHONPATH": str(REPOSITORY), "TERM": "xterm"}
        subprocess.run([sys.executable, "-c", program], stderr=stream, env=os.environ | own, check=False)

    screen = Screen(on_a_terminal(60, end))
    assert sorted(re.sub(r"\d:\d\d", "-", line) for line in screen.lines) == ["", how, "it is starting  -"]
    assert screen.lines[-1] == ""
    assert screen.cursor_shown
