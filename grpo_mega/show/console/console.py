"""Shows the progress of a run: on a terminal as a table above a panel (`panel.py`), elsewhere as lines.

Off a terminal every line stands alone, as it may be read in a file far from any header:

    step 10/80: reward 0.213, accuracy 4.7%, format 93.8%, length 18.2, clipped 0.1%, grad norm 0.412, 0.52 s, 0:05
    elapsed, 0:36 left

is one line. While a step takes longer than a minute, a line a minute says what it does, even when the run gives no sign
of life:

    after step 10/80: generate for 3:00, 1:12:05 elapsed, 8:20:00 left

A dash stands for a value that a step lacks because it trained nothing.
"""

from __future__ import annotations

import io
import os
import sys
import textwrap
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from threading import Event, RLock, Thread
from typing import Any, TextIO

from rich.console import Console as Printer
from rich.console import ConsoleDimensions, RenderableType
from rich.file_proxy import FileProxy
from rich.text import Text

from grpo_mega.observe import waiting
from grpo_mega.observe.foreign import printable
from grpo_mega.observe.metrics import HELD_OUT
from grpo_mega.observe.recorder import Observer
from grpo_mega.observe.samples import telling
from grpo_mega.observe.waiting import QUIET, clock
from grpo_mega.show.console.columns import (
    SECONDS,
    TABLE,
    Column,
    as_shown,
    column,
    digits_of,
    label,
    mean,
    number,
    shorten,
)
from grpo_mega.show.console.panel import RECENT, Snapshot, Sparkline, draw_panel, extend_curves

WIDTH = 120
"""Characters of a line of text off a terminal."""
STEP_WIDTH = 8
ROWS_PER_SAMPLES = 5
ROWS_PER_HEADER = 20
INDENT = "    "
"""Indent of all lines of a text but the first."""
SUPERVISED = ("sft/loss", "sft/grad_norm")

ACHIEVEMENTS = (
    ("held-out accuracy", "held_out_accuracy", ".1%"),
    ("format rate", "format_rate", ".1%"),
    ("mean length", "mean_length", ".1f"),
    ("held-out pair accuracy", "held_out_pair_accuracy", ".1%"),
    ("calibration error", "held_out_pair_calibration_error", ".3f"),
    ("held-out step accuracy", "held_out_step_accuracy", ".1%"),
    ("area under the curve", "held_out_step_auc", ".3f"),
    ("calibration error", "held_out_step_calibration_error", ".3f"),
)


class Progress:
    """Counts steps, and measures phases, which are reported as they begin and while they go on.

    A phase that another one interrupts, as scoring interrupts generation, goes on counting when it comes again.

    Attributes:
        name, stage, step, total, phase, samples: As in `Snapshot`.
    """

    def __init__(self, name: str, total: int) -> None:
        """Starts the clock of a run of `total` steps."""
        self.name, self.stage, self.step, self.total = name, "", 0, total
        self.phase, self.samples = "", (0, 0)
        self._step_seconds: deque[float] = deque(maxlen=RECENT)
        self._durations: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))
        self._spent: dict[str, float] = {}
        self._began = self._since = time.monotonic()

    def enter(self, stage: str, step: int, total: int) -> None:
        """Begins a stage of at most `total` steps, or continues it after `step` of them."""
        self.stage, self.step, self.total = stage, step, total
        self._step_seconds.clear()

    def finish(self, step: int, metrics: Mapping[str, float]) -> None:
        """Counts a finished step."""
        self._pause()
        self.step = step
        if metrics.get(SECONDS) is not None:
            self._step_seconds.append(metrics[SECONDS])
        for phase, seconds in self._spent.items():
            self._durations[phase].append(seconds)
        self._spent = {}

    def begin(self, phase: str) -> None:
        """Begins or continues a phase; "" ends the previous one."""
        if phase != self.phase:
            self._pause()
            self.phase, self.samples = phase, (0, 0)

    def _pause(self) -> None:
        now = time.monotonic()
        if self.phase:
            self._spent[self.phase] = self._spent.get(self.phase, 0.0) + now - self._since
        self._since = now

    def snapshot(self) -> Snapshot:
        """The progress at this moment. The phase's share and end follow from its samples or from earlier steps."""
        now = time.monotonic()
        # Copies: another thread may draw while the run appends.
        recent, durations = list(self._step_seconds), list(self._durations.get(self.phase, ()))
        seconds, (done, needed) = self._spent.get(self.phase, 0.0) + now - self._since, self.samples
        usual = median(durations) if durations else 0.0
        share = left = None
        if needed:
            share = done / needed
        elif usual:
            share = min(seconds / usual, 1.0)
        if usual:
            left = usual - seconds if usual > seconds else None
        elif done:
            left = seconds * (needed - done) / done
        return Snapshot(
            self.name, self.stage, self.step, self.total,
            elapsed=clock(now - self._began),
            left=clock(mean(recent) * max(self.total - self.step, 0)) if recent else "",
            phase=self.phase, phase_seconds=seconds, phase_share=share, phase_left=left, samples=self.samples,
        )  # fmt: skip


class Console(Observer):
    """Prints the progress of one run.

    On a terminal, a thread draws the panel below what is printed, so that its clocks go on whatever the run does.
    Sparklines show all steps since the stage was begun or continued. Every line fits into the terminal, and the panel
    disappears when the run ends. Seconds per step are the metric "time/step"; the console's clock is for phases and for
    the time since it began.
    """

    def __init__(
        self,
        total_steps: int,
        path: Path,
        print_every: int,
        columns: Sequence[Column] = TABLE,
        stream: TextIO | None = None,
    ) -> None:
        """Prints to `stream` (default stderr) a row of `columns` every `print_every` steps of the run in `path`."""
        # The line of `waiting` may have replaced sys.stderr, which is looked up below.
        waiting.end()
        self._stream = stream = stream or sys.stderr
        self._total, self._path, self._print_every, self._columns = total_steps, path, print_every, columns
        self._any_row, self._rows_until_header = False, 0
        self._up: dict[str, int] = {}
        self._curves: dict[str, Sparkline] = {}
        # The lock is reentrant because `_break_silence` holds it while it calls `_write`, which takes it again.
        self._last, self._turn, self._closed = time.monotonic(), RLock(), Event()
        self._watch: Thread | None = None
        self._on_terminal = stream.isatty()
        if not self._on_terminal and isinstance(stream, io.TextIOWrapper):
            # Independent of the locale, which jobs lack. Tracebacks use the stream too, and may hold any text.
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
        self._utf = "utf" in (stream.encoding or "utf").lower()
        self._progress = Progress(self._printable(path.name), total_steps)
        self._live = None
        if self._on_terminal:
            # Standard output goes above the panel only if it is a terminal: what is for a file must stay in it.
            self._live = waiting.start_live(stream, self._draw, transient=True, redirect_stdout=sys.stdout.isatty())

    def start(self, lines: list[str], where: str = "") -> None:
        """Prints the name of the run, where it is, and lines that describe it, before the first step."""
        self.note(f"grpo_mega  {self._path.name}{where and '  '}{where}")
        for line in lines:
            self.note(f"  {line}")
        self.note("")

    def stage(self, name: str, step: int, steps: int) -> None:
        """Shows that a stage begins, or goes on after `step` of at most `steps` steps; the last stage has no name."""
        self._progress.enter(name, step, steps)
        self._curves = {}

    def step(self, step: int, metrics: dict[str, float], shown: Sequence[dict[str, Any]] = ()) -> None:
        """Shows a finished step: in the panel, and as a row when due (always for the first and last).

        Every few rows, and at the end, the best and the worst sample follow.
        """
        self._progress.finish(step, metrics)
        extend_curves(self._curves, metrics, self._columns)
        due = step % self._print_every == 0
        if not shown and not any(c.metric in metrics for c in self._columns if c.metric != SECONDS):
            # A step of an earlier stage, for which the table has no column. The base model's stage prints its lines.
            supervised = [column(name) for name in SUPERVISED if name in metrics]
            if supervised and not self._live and (due or step == self._progress.total):
                values = ", ".join(f"{each.title} {each.text(metrics)}" for each in supervised)
                self._write(f"step {step}/{self._progress.total} of {self._progress.stage}: {values}")
            return
        if not self._any_row or due or step == self._total:
            self._any_row = True
            (self._table_row if self._live else self._line)(step, metrics)
        if step % (self._print_every * ROWS_PER_SAMPLES) == 0 or step == self._total:
            for chosen, record in telling(shown):
                self.sample(record["prompt"], record["completion"], record["answer"], record["reward"], chosen)

    def _table_row(self, step: int, metrics: dict[str, float]) -> None:
        """Prints a step as a row with the columns that fit; the header is repeated now and then."""
        rows = [[f"{step:>{STEP_WIDTH}}", *(each.text(metrics) for each in self._columns)]]
        if self._rows_until_header == 0:
            rows.insert(0, [f"{'step':>{STEP_WIDTH}}", *(each.title for each in self._columns)])
            self._rows_until_header = ROWS_PER_HEADER
        width, _ = self._size()
        for line, *texts in rows:
            for text, each in zip(texts, self._columns, strict=True):
                if len(line) + each.width > width:
                    break
                line += f"{text:>{each.width}}"
            self._write(line[:width])
        self._rows_until_header -= 1

    def _line(self, step: int, metrics: dict[str, float]) -> None:
        """Prints a step in one line, never cut or wrapped."""
        at = self._progress.snapshot()
        values = [f"{each.title} {each.text(metrics)}" for each in self._columns if each.metric != SECONDS]
        values += [f"{each.text(metrics)} s" for each in self._columns if each.metric == SECONDS]
        values += [f"{at.elapsed} elapsed"] + [f"{at.left} left"] * bool(at.left)
        self._write(f"step {step}/{at.total}: {', '.join(values)}")

    def phase(self, name: str) -> None:
        """Shows the running phase and its time: in the panel or, after a minute of silence, in a line.

        Called as it begins and, often, while it goes on.
        """
        self._progress.begin(name)
        if self._live:
            return
        if self._watch is None:
            self._watch = Thread(target=self._break_silences, name="console", daemon=True)
            self._watch.start()
        self._break_silence()

    def _break_silences(self) -> None:
        # Nobody may read the pipe any more, or the file may be closed: the run learns that from its next row.
        with suppress(OSError, ValueError):
            while not self._closed.wait(max(0.0, self._last + QUIET - time.monotonic())):
                self._break_silence()

    def _break_silence(self) -> None:
        """Prints the running phase, if nothing was printed for a while."""
        with self._turn:
            if self._closed.is_set() or time.monotonic() - self._last < QUIET:
                return
            at = self._progress.snapshot()
            done, needed = at.samples
            step = f"after step {at.step}/{at.total}{at.stage and f' of {at.stage}'}"
            parts = [f"{step}: {at.phase} for {clock(at.phase_seconds)}", f"{done}/{needed} samples" * bool(needed)]
            self._write(", ".join(filter(None, [*parts, f"{at.elapsed} elapsed", at.time_left])))

    def samples(self, done: int, needed: int) -> None:
        """Shows how many samples of the phase are done, and how many it needs."""
        self._progress.samples = done, needed

    def sample(
        self, prompt_text: str, completion_text: str, answer: str, reward: float | None, chosen: str = ""
    ) -> None:
        """Prints a prompt with its completion, its reward if it has one, and how it was chosen.

        Long texts are shortened in the middle: to one line, on a terminal to a third of its height.
        """
        prompt, completion, answer = (self._printable(text) for text in (prompt_text, completion_text, answer))
        scored = "no score" if reward is None else f"reward {reward:.2f}"
        verdict = f"  [{chosen}{', ' if chosen else ''}answer {shorten(answer, 20)}, {scored}]"
        width, height = self._size()
        lines = max(height // 3, 1) if self._live else 1
        whole = lines * width - (lines - 1) * len(INDENT)
        room = max(whole - len(verdict) - len("  | ") - len(" -> "), 20)
        prompt = shorten(prompt, room // 3)
        text = f"  | {prompt} -> {shorten(completion, room - len(prompt))}{verdict}"
        self.note(text, whole_words=lines == 1)
        self._rows_until_header = 0

    def evaluation(self, step: int, split: str, metrics: dict[str, float]) -> None:
        """Prints one line with the metrics of an evaluation, without those of single tasks, which have a slash."""
        names = [name for name in metrics if "/" not in name]
        columns = (as_shown(Column(label(name), name, digits_of(name)), self._columns) for name in names)
        numbers = (f"{each.title} {each.text(metrics)}" for each in columns)
        self.note(f"{step:>{STEP_WIDTH}}  {split}: " + ", ".join(numbers))
        if split == "held-out":
            held_out = {f"{HELD_OUT}{name}": value for name, value in metrics.items()}
            extend_curves(self._curves, held_out, self._columns)

    def alarm(self, record: dict[str, Any]) -> None:
        """Prints an alarm that rises, with what to do, or that is over; `record` is a line of alarms.jsonl."""
        step, name = record["step"], record["name"]
        if record.get("cleared"):
            # Replaced and never changed: the thread that draws may be iterating over the former one.
            self._up = {up: since for up, since in self._up.items() if up != name}
            self.note(f"{step:>{STEP_WIDTH}}  alarm {name} is over")
        else:
            self._up = self._up | {name: step}
            self.note(f"{step:>{STEP_WIDTH}}  ALARM {name}: {record['message']}. {record['action']}")
        self._rows_until_header = 0

    def finish(self, summary: dict[str, Any]) -> None:
        """Prints the last line: the results, from the fields of summary.json, and the run directory."""
        parts = [f"{summary['steps']} steps"]
        for achievement in ACHIEVEMENTS:
            words, key, digits = as_shown(Column(*achievement), self._columns)
            before, after = summary.get(f"{key}_before"), summary.get(f"{key}_after")
            if after is not None:
                start = f"{number(before, digits)} -> " if before is not None else ""
                parts.append(f"{words} {start}{number(after, digits)}")
        if alarms := summary.get("alarms"):
            names = dict.fromkeys(f"{a['name']} at step {a['step']}" + (" (up)" * (not a["cleared"])) for a in alarms)
            parts.append(f"alarms: {', '.join(names)}")
        self.close()
        self.note(f"{self._path.name} {summary['status']}: {', '.join(parts)}. Everything is in {self._path}")

    def close(self) -> None:
        """Removes the panel, so that the next output starts on a clean line."""
        self._closed.set()
        if self._live:
            self._live.stop()
        self._progress.begin("")

    def note(self, text: str, whole_words: bool = True) -> None:
        """Prints any text, wrapped to the width; a long word, such as a path, stays whole unless it need not."""
        # textwrap needs a width larger than the indent.
        width = max(self._size()[0], 10)
        for line in text.splitlines() or [""]:
            wrapped = textwrap.fill(
                self._printable(line), width, subsequent_indent=INDENT, break_long_words=not whole_words,
                break_on_hyphens=False,
            )  # fmt: skip
            self._write(wrapped)

    def _printable(self, text: str) -> str:
        """The text with control characters escaped, so that a completion cannot control a terminal or a log viewer."""
        return printable(text, keep="", ascii_only=not self._utf)

    def _write(self, text: str) -> None:
        """Writes text unchanged, above the panel if there is one."""
        if self._live:
            self._live.console.print(Text(text), soft_wrap=True)
            return
        with self._turn:
            self._stream.write(f"{text}\n")
            self._stream.flush()
            self._last = time.monotonic()

    def _size(self) -> tuple[int, int]:
        """Characters of a line, and lines of the terminal, whose last column stays empty, as some wrap there."""
        if not self._on_terminal:
            return WIDTH, 1
        columns, lines = os.get_terminal_size(self._stream.fileno())
        return (columns or 80) - 1, lines or 24

    def _draw(self, printer: Printer) -> RenderableType:
        """The panel, in at most half the terminal's height; called by the thread that draws."""
        width, lines = self._size()
        printer.size = ConsoleDimensions(width, lines)
        up = [f"{name} since step {step}" for name, step in self._up.items()]
        rows = max(0, lines // 2 - 4)
        return draw_panel(self._progress.snapshot(), self._curves.copy(), up, width, rows, plain=not self._utf)


def _leave_the_panel() -> None:
    """Makes a forked process, such as one that writes a checkpoint, print past the panel, as its locks may be held."""
    if isinstance(sys.stdout, FileProxy):
        sys.stdout = sys.stdout.rich_proxied_file
    if isinstance(sys.stderr, FileProxy):
        sys.stderr = sys.stderr.rich_proxied_file


os.register_at_fork(after_in_child=_leave_the_panel)
