"""Shows the progress of a run: as a panel and a table on a terminal (`panel.py`), as lines elsewhere (`lines.py`).

A dash stands for a value that a step does not have, because nothing was trained in it.
"""

from __future__ import annotations

import io
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from grpo_mega.observe import waiting
from grpo_mega.observe.foreign import printable
from grpo_mega.observe.metrics import HELD_OUT
from grpo_mega.observe.recorder import Observer
from grpo_mega.observe.samples import telling
from grpo_mega.show.console.columns import SECONDS, TABLE, Column, as_shown, digits_of, label, number, shorten
from grpo_mega.show.console.lines import Lines
from grpo_mega.show.console.panel import STEP_WIDTH, LivePanel
from grpo_mega.show.console.progress import Progress

ROWS_PER_SAMPLES = 5
INDENT = "    "
"""Indent of all lines of a text but the first."""

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


class Console(Observer):
    """Prints the progress of one run.

    Seconds per step are the metric "time/step"; its clock is for phases and for the time since it began.
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
        self._total = total_steps
        self._name, self._path = path.name, path
        self._print_every = print_every
        self._columns = columns
        self._begun = False
        self._up: dict[str, int] = {}
        waiting.end()  # its line may have replaced sys.stderr
        stream = stream or sys.stderr
        live = stream.isatty()
        if not live and isinstance(stream, io.TextIOWrapper):
            # Independent of the locale, which jobs do not have. Tracebacks use the stream too, and may hold any text.
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
        self._utf = "utf" in (stream.encoding or "utf").lower()
        self._progress = Progress(self._printable(path.name), total_steps)
        self._out: LivePanel | Lines = (LivePanel if live else Lines)(stream, self._progress, columns)

    def start(self, lines: list[str], where: str = "") -> None:
        """Prints the name of the run, where it is, and lines that describe it, before the first step."""
        self._print(f"grpo_mega  {self._name}{where and '  '}{where}")
        for line in lines:
            self._print(f"  {line}")
        self._print("")

    def stage(self, name: str, step: int, steps: int) -> None:
        """Shows that a stage begins, or goes on after `step` of at most `steps` steps; the last stage has no name."""
        self._progress.enter(name, step, steps)
        self._out.forget()

    def step(self, step: int, metrics: dict[str, float], shown: Sequence[dict[str, Any]] = ()) -> None:
        """Shows a finished step: in the panel, and as a row when due (always for the first and last).

        Every few rows, and at the end, the best and the worst sample follow.
        """
        self._progress.finish(step, metrics)
        self._out.remember(metrics)
        due = step % self._print_every == 0
        if not shown and not any(c.metric in metrics for c in self._columns if c.metric != SECONDS):
            if due or step == self._progress.total:  # no column for it, as for a step of an earlier stage
                self._out.count(step, metrics)
            return
        if not self._begun or due or step == self._total:
            self._begun = True
            self._out.row(step, metrics)
        if step % (self._print_every * ROWS_PER_SAMPLES) == 0 or step == self._total:
            for chosen, record in telling(shown):
                self.sample(record["prompt"], record["completion"], record["answer"], record["reward"], chosen)

    def phase(self, name: str) -> None:
        """Shows which phase runs, and for how long: in the panel or, after a minute of silence, in a line of its own.

        Called as it begins and, often, while it goes on.
        """
        self._progress.begin(name)
        self._out.phase()

    def samples(self, done: int, needed: int) -> None:
        """Shows how many samples of the phase are done, and how many it needs."""
        self._progress.samples = done, needed

    def sample(
        self, prompt_text: str, completion_text: str, answer: str, reward: float | None, chosen: str = ""
    ) -> None:
        """Prints a prompt with its completion, its reward if it has one, and how it was chosen.

        Long texts are shortened in the middle: to one line, on a terminal to several.
        """
        prompt, completion, answer = (self._printable(text) for text in (prompt_text, completion_text, answer))
        scored = "no score" if reward is None else f"reward {reward:.2f}"
        verdict = f"  [{chosen}{', ' if chosen else ''}answer {shorten(answer, 20)}, {scored}]"
        lines = self._out.lines_per_sample
        whole = lines * self._out.width - (lines - 1) * len(INDENT)
        room = max(whole - len(verdict) - len("  | ") - len(" -> "), 20)
        prompt = shorten(prompt, room // 3)
        text = f"  | {prompt} -> {shorten(completion, room - len(prompt))}{verdict}"
        self._print(text, whole_words=lines == 1)
        self._out.interrupt_table()

    def evaluation(self, step: int, split: str, metrics: dict[str, float]) -> None:
        """Prints one line with the metrics of an evaluation, without those of single tasks, which have a slash."""
        names = [name for name in metrics if "/" not in name]
        columns = (as_shown(Column(label(name), name, digits_of(name)), self._columns) for name in names)
        numbers = (f"{column.title} {column.text(metrics)}" for column in columns)
        self._print(f"{step:>{STEP_WIDTH}}  {split}: " + ", ".join(numbers))
        if split == "held-out":
            self._out.remember({f"{HELD_OUT}{name}": value for name, value in metrics.items()})

    def alarm(self, record: dict[str, Any]) -> None:
        """Prints an alarm that rises, with what to do, or that is over; `record` is a line of alarms.jsonl."""
        step, name = record["step"], record["name"]
        if record.get("cleared"):
            self._up.pop(name, None)
            self._print(f"{step:>{STEP_WIDTH}}  alarm {name} is over")
        else:
            self._up[name] = step
            self._print(f"{step:>{STEP_WIDTH}}  ALARM {name}: {record['message']}. {record['action']}")
        self._out.alarms([f"{name} since step {step}" for name, step in self._up.items()])
        self._out.interrupt_table()

    def note(self, text: str) -> None:
        """Prints any other text."""
        self._print(text)

    def finish(self, summary: dict[str, Any]) -> None:
        """Prints the last line: the results, from the fields of summary.json, and the run directory."""
        parts = [f"{summary['steps']} steps"]
        for achievement in ACHIEVEMENTS:
            words, key, digits = as_shown(Column(*achievement), self._columns)
            before, after = summary.get(f"{key}_before"), summary.get(f"{key}_after")
            if after is not None:
                begun = f"{number(before, digits)} -> " if before is not None else ""
                parts.append(f"{words} {begun}{number(after, digits)}")
        if alarms := summary.get("alarms"):
            names = dict.fromkeys(f"{a['name']} at step {a['step']}" + (" (up)" * (not a["cleared"])) for a in alarms)
            parts.append(f"alarms: {', '.join(names)}")
        self.close()
        self._print(f"{self._name} {summary['status']}: {', '.join(parts)}. Everything is in {self._path}")

    def close(self) -> None:
        """Removes the panel, so that the next output starts on a clean line."""
        self._out.close()
        self._progress.begin("")

    def _print(self, text: str, whole_words: bool = True) -> None:
        """Prints text, wrapped to the width; a long word, such as a path, stays whole unless it need not."""
        width = max(self._out.width, 10)  # textwrap needs more room than the indent
        for line in text.splitlines() or [""]:
            wrapped = textwrap.fill(
                self._printable(line), width, subsequent_indent=INDENT, break_long_words=not whole_words,
                break_on_hyphens=False,
            )  # fmt: skip
            self._out.print(wrapped)

    def _printable(self, text: str) -> str:
        """The text with control characters escaped, so that a completion cannot control a terminal or a log viewer."""
        return printable(text, keep="", ascii_only=not self._utf)
