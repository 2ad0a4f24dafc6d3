"""Shows the progress of a run: as a table and a progress bar on a terminal, as self-contained lines elsewhere.

The table looks like this; a narrow terminal shows only the first columns:

      step    reward  accuracy    format    length   clipped  grad norm   seconds
        10     0.213      4.7%     93.8%      18.2      0.1%      0.412      0.52

In a file, among other lines and far from any header, the same row is

    step 10/80: reward 0.213, accuracy 4.7%, format 93.8%, length 18.2, clipped 0.1%, grad norm 0.412, 0.52 s, 0:05
    elapsed, 0:36 left

in one line. There a step that takes longer than a minute says so once a minute, and what it does:

    after step 10/80: generate for 3:00, 1:12:05 elapsed

A dash stands for a value that a step does not have, because nothing was trained in it.
"""

from __future__ import annotations

import io
import math
import os
import sys
import textwrap
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, TextIO

from grpo_mega.config.schema import REWARD_MODELS, Config

PLAIN_WIDTH = 120
ROWS_PER_HEADER = 20
ROWS_PER_SAMPLES = 5
ERASE_LINE = "\r\x1b[K"
PHASE_SECONDS = 1.0
"""Between two drawings of a bar in which only the time of the phase has changed."""
PLAIN_SECONDS = 60.0
"""The longest silence off a terminal while a phase gives signs of life."""
SECONDS = "time/step"


class Column(NamedTuple):
    """A column of the table."""

    title: str
    metric: str
    format: str

    def text(self, metrics: dict[str, float]) -> str:
        """The metric's value as the table and the bar show it; "-" when there is none."""
        value = metrics.get(self.metric)
        return "-" if value is None else _number(value, self.format)

    @property
    def width(self) -> int:
        """Characters the column takes, the space before it included."""
        return max(len(self.title), 8) + 2


REWARD = Column("reward", "reward/mean", ".3f")
ACCURACY = Column("accuracy", "reward/accuracy", ".1%")
FORMAT = Column("format", "reward/format", ".1%")
LENGTH = Column("length", "rollout/length_mean", ".1f")
KL = Column("kl", "policy/kl", ".4f")
ENTROPY = Column("entropy", "policy/entropy", ".3f")
CLIPPED = Column("clipped", "policy/clip_fraction", ".1%")
GRAD_NORM = Column("grad norm", "policy/grad_norm", ".3f")
TIME = Column("seconds", SECONDS, ".2f")
PAIR_LOSS = Column("loss", "reward_model/loss", ".4f")
PAIR_ACCURACY = Column("accuracy", "reward_model/accuracy", ".1%")
MARGIN = Column("margin", "reward_model/margin", ".3f")
PAIR_GRAD_NORM = Column("grad norm", "reward_model/grad_norm", ".3f")
STEP_LOSS = Column("loss", "process_reward_model/loss", ".4f")
STEP_ACCURACY = Column("accuracy", "process_reward_model/accuracy", ".1%")
STEP_GRAD_NORM = Column("grad norm", "process_reward_model/grad_norm", ".3f")
TABLE = (REWARD, ACCURACY, FORMAT, LENGTH, KL, ENTROPY, CLIPPED, GRAD_NORM, TIME)
OF_PAIRS = (PAIR_LOSS, PAIR_ACCURACY, MARGIN, PAIR_GRAD_NORM, TIME)
"""The table of a reward model's training."""
OF_STEPS = (STEP_LOSS, STEP_ACCURACY, STEP_GRAD_NORM, TIME)
"""That of a process reward model's."""
BAR = (REWARD, ACCURACY, FORMAT, LENGTH, PAIR_LOSS, PAIR_ACCURACY, STEP_LOSS, STEP_ACCURACY)
STEP_WIDTH = 8


def columns_of(config: Config) -> list[Column]:
    """The columns of a run's table; entropy replaces the KL column where there is no KL term."""
    if config.run.trains in REWARD_MODELS:
        return [*(OF_PAIRS if config.run.trains == "reward_model" else OF_STEPS)]
    available = {f"reward/{term.name}" for term in config.reward.terms} | {REWARD.metric, ACCURACY.metric}
    unused = ENTROPY if config.algorithm.kl_coef else KL
    return [c for c in TABLE if c is not unused and (c.metric in available or not c.metric.startswith("reward/"))]


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


class Console:
    """Prints the progress of one run.

    Seconds per step are the metric "time/step"; its clock is for phases and for the time since it began.
    """

    def __init__(
        self,
        total_steps: int,
        name: str,
        print_every: int,
        columns: Sequence[Column] = TABLE,
        stream: TextIO | None = None,
    ) -> None:
        """Prints to `stream` (default stderr) a row of `columns` every `print_every` steps of the run `name`."""
        self._total = total_steps
        self._name = name
        self._print_every = print_every
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        if not self._live and isinstance(self._stream, io.TextIOWrapper):
            # Independent of the locale, which jobs do not have. Tracebacks use the stream too, and may hold any text.
            self._stream.reconfigure(encoding="utf-8", errors="backslashreplace")
        self._utf = "utf" in (self._stream.encoding or "utf").lower()
        self._recent: deque[float] = deque(maxlen=20)
        self._columns = columns
        self._begun = False
        self._rows_until_header = 0
        self._bar: list[str] = []
        self._phase, self._phase_began, self._drawn = "", 0.0, 0.0
        self._step = 0
        self._began = self._last_line = time.monotonic()

    def start(self, lines: list[str]) -> None:
        """Prints the name of the run and lines that describe it, before the first step."""
        self._print(f"grpo_mega  {self._name}")
        for line in lines:
            self._print(f"  {line}")
        self._print("")

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Shows a finished step: updates the bar, and prints a row when due (always for the first and last)."""
        self._step = step
        if metrics.get(SECONDS) is not None:
            self._recent.append(metrics[SECONDS])
        if not self._begun or step % self._print_every == 0 or step == self._total:
            self._begun = True
            if self._live:
                self._row(step, metrics)
            else:
                self._log_line(step, metrics)
        self._bar = self._parts_of_bar(step, metrics)
        self._redraw()

    def phase(self, name: str) -> None:
        """Shows which phase runs, and for how long: in the bar or, after a minute of silence, in a line of its own.

        Called as it begins and, often, while it goes on.
        """
        now, begins = time.monotonic(), name != self._phase
        if begins:
            self._phase, self._phase_began = name, now
        if self._live and (begins or now - self._drawn >= PHASE_SECONDS):
            self._drawn = now
            self._redraw()
        elif not self._live and now - self._last_line >= PLAIN_SECONDS:
            lasts = _clock(now - self._phase_began)
            self._line(f"after step {self._step}/{self._total}: {name} for {lasts}, {self._elapsed()} elapsed")

    def has_columns_for(self, metrics: dict[str, float]) -> bool:
        """Whether the table has a column, besides the time, for one of these metrics."""
        return any(column.metric in metrics for column in self._columns if column is not TIME)

    def shows_samples(self, step: int) -> bool:
        """Whether samples of this step are to be printed: every few rows, and at the end."""
        return step % (self._print_every * ROWS_PER_SAMPLES) == 0 or step == self._total

    def sample(
        self, prompt_text: str, completion_text: str, answer: str, reward: float | None, chosen: str = ""
    ) -> None:
        """Prints a prompt with its completion, its reward or none, and how it was chosen; long texts are shortened in
        the middle."""
        prompt, completion, answer = (self._printable(text) for text in (prompt_text, completion_text, answer))
        scored = "no score" if reward is None else f"reward {reward:.2f}"
        verdict = f"  [{chosen}{', ' if chosen else ''}answer {_shorten(answer, 20)}, {scored}]"
        room = max(self._width - len(verdict) - len("  | ") - len(" -> "), 20)
        prompt = _shorten(prompt, room // 3)
        self._print(f"  | {prompt} -> {_shorten(completion, room - len(prompt))}{verdict}")
        self._rows_until_header = 0

    def evaluation(self, step: int, split: str, metrics: dict[str, float]) -> None:
        """Prints one line with the metrics of an evaluation, without the part of their names before the slash."""
        numbers = (f"{_label(name)} {_number(value, _format_of(name))}" for name, value in metrics.items())
        self._print(f"{step:>{STEP_WIDTH}}  {split}: " + ", ".join(numbers))

    def alarm(self, record: dict[str, Any]) -> None:
        """Prints an alarm that rises, with what to do, or that is over; records are those of alarms.jsonl."""
        step, name = record["step"], record["name"]
        if record.get("cleared"):
            self._print(f"{step:>{STEP_WIDTH}}  alarm {name} is over")
        else:
            self._print(f"{step:>{STEP_WIDTH}}  ALARM {name}: {record['message']}. {record['action']}")
        self._rows_until_header = 0

    def note(self, text: str) -> None:
        """Prints any other text."""
        self._print(text)

    def finish(self, summary: dict[str, Any], where: Path) -> None:
        """Prints the last line: the results, from the fields of summary.json, and the run directory `where`."""
        parts = [f"{summary['steps']} steps"]
        for label, key, number in ACHIEVEMENTS:
            before, after = summary.get(f"{key}_before"), summary.get(f"{key}_after")
            if after is not None:
                begun = f"{_number(before, number)} -> " if before is not None else ""
                parts.append(f"{label} {begun}{_number(after, number)}")
        if alarms := summary.get("alarms"):
            names = dict.fromkeys(f"{a['name']} at step {a['step']}" + (" (up)" * (not a["cleared"])) for a in alarms)
            parts.append(f"alarms: {', '.join(names)}")
        self.close()
        self._print(f"{self._name} {summary['status']}: {', '.join(parts)}. Everything is in {where}")

    def close(self) -> None:
        """Removes the bar, so that the next output starts on a clean line."""
        self._bar, self._phase = [], ""
        self._redraw()

    @property
    def _width(self) -> int:
        """Most characters in a line. A terminal's last column is not used, because some terminals wrap there."""
        if not self._live:
            return PLAIN_WIDTH
        return (os.get_terminal_size(self._stream.fileno()).columns or 80) - 1

    def _print(self, text: str) -> None:
        """Prints text above the bar, wrapped to the width; a long word, such as a path, stays whole."""
        width = max(self._width, 10)  # textwrap needs more room than the indent
        erase = ERASE_LINE if self._live else ""
        for line in text.splitlines() or [""]:
            wrapped = textwrap.fill(
                self._printable(line), width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
            )
            self._stream.write(f"{erase}{wrapped}\n")
        self._last_line = time.monotonic()
        self._redraw()

    def _redraw(self) -> None:
        if self._live:
            self._stream.write(ERASE_LINE + self._fitted_bar())
        self._stream.flush()

    def _fitted_bar(self) -> str:
        """The progress bar, the last line of a terminal; parts that do not fit are left out from the right."""
        phase = [f"{self._phase} {_clock(time.monotonic() - self._phase_began)}"] if self._phase else []
        parts = [*(self._bar[:1] or ([self._name] if phase else [])), *phase, *self._bar[1:]]
        while len(parts) > 1 and len("  ".join(parts)) > self._width:
            parts.pop()
        return _shorten("  ".join(parts), self._width)

    def _row(self, step: int, metrics: dict[str, float]) -> None:
        if self._rows_until_header == 0:
            self._print(_fitting(f"{'step':>{STEP_WIDTH}}", [(c.title, c.width) for c in self._columns], self._width))
            self._rows_until_header = ROWS_PER_HEADER
        cells = [(c.text(metrics), c.width) for c in self._columns]
        self._print(_fitting(f"{step:>{STEP_WIDTH}}", cells, self._width))
        self._rows_until_header -= 1

    def _log_line(self, step: int, metrics: dict[str, float]) -> None:
        """Prints a row as a self-contained line, never cut or wrapped."""
        values = [f"{column.title} {column.text(metrics)}" for column in self._columns if column is not TIME]
        if TIME in self._columns:
            values.append(f"{TIME.text(metrics)} s")
        values.append(f"{self._elapsed()} elapsed")
        if self._recent:
            values.append(f"{self._time_left(step)} left")
        self._line(f"step {step}/{self._total}: {', '.join(values)}")

    def _line(self, text: str) -> None:
        """Prints text off a terminal as one line, however long."""
        self._stream.write(f"{text}\n")
        self._stream.flush()
        self._last_line = time.monotonic()

    def _elapsed(self) -> str:
        return _clock(time.monotonic() - self._began)

    def _time_left(self, step: int) -> str:
        return _clock(fmean(self._recent) * max(self._total - step, 0))

    def _parts_of_bar(self, step: int, metrics: dict[str, float]) -> list[str]:
        """The bar itself, and what follows it, the most important first."""
        length = 20 if self._width >= 80 else 10
        done = round(length * min(step / max(self._total, 1), 1.0))
        full, rest = ("━", "─") if self._utf else ("=", "-")
        parts = [f"{_shorten(self._name, 20)}  {full * done}{rest * (length - done)}  {step}/{self._total}"]
        if self._recent:
            parts.append(f"{self._time_left(step)} left")
        parts += [f"{column.title} {column.text(metrics)}" for column in BAR if column.metric in metrics]
        if self._recent:
            parts.append(f"{fmean(self._recent):.2f} s/step")
        return parts

    def _printable(self, text: str) -> str:
        """The text with control characters escaped, so that a completion cannot control a terminal or a log viewer."""
        return "".join(
            char if char.isprintable() and (self._utf or char.isascii()) else char.encode("unicode_escape").decode()
            for char in text
        )


def _fitting(line: str, cells: list[tuple[str, int]], width: int) -> str:
    """The line and as many right-aligned cells as fit into the width."""
    for text, cell_width in cells:
        if len(line) + cell_width > width:
            break
        line += f"{text:>{cell_width}}"
    return line


def _number(value: float, number: str) -> str:
    """The value in its format, in scientific notation when that would be wider than a column."""
    text = format(value, number)
    return text if len(text) <= 8 else f"{value:.1e}"


def _label(metric: str) -> str:
    """The name of a metric in a sentence: "length" for "eval/length_mean"."""
    return metric.rpartition("/")[2].removesuffix("_mean").replace("_", " ")


def _format_of(metric: str) -> str:
    share = "@" in metric or metric.endswith(("accuracy", "format", "rate", "fraction", "truncated"))  # @: pass@k
    return ".1%" if share else ".4g"


def _shorten(text: str, width: int) -> str:
    """Text of at most `width` characters: its beginning and its end, "..." between them."""
    if len(text) <= width:
        return text
    kept = max(width - 3, 0)
    return (text[: kept - kept // 2] + "..." + text[len(text) - kept // 2 :])[: max(width, 0)]


def _clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss; dashes when they are not finite."""
    if not math.isfinite(seconds):
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
