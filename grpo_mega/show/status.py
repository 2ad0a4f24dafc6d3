"""Prints the panel of a run once, as the console shows it while the run lives, from the files of the run directory.

    python -m grpo_mega.show.status runs/tiny

The run may still be going, on any machine, or have ended in any way. The panel is as wide as the terminal, or 80
characters. Its last line says how the run ended or when it last gave a sign of life. The elapsed time is the sum of all
recorded steps. The phase is the newest one in the main rank's flight recorder (`platform/flight.py`): it counts until
now if this machine sees that rank's process alive, else until the last sign of life.

Exit code: 0 printed; 2 nothing to show, or a file of the run is damaged.
"""

from __future__ import annotations

import argparse
import re
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console, RenderableType

from grpo_mega.errors import InputError, instead_of
from grpo_mega.observe.alarm_log import ALARMS_FILE, risen
from grpo_mega.observe.foreign import contents, finite, read_object, tell
from grpo_mega.observe.logs import last_error
from grpo_mega.observe.metrics import METRICS, is_held_out, read_metrics
from grpo_mega.observe.run_dir import CONFIG, LOCK, has_checkpoints, naming
from grpo_mega.observe.summary import SUMMARY, how_it_ended
from grpo_mega.observe.waiting import clock
from grpo_mega.platform.flight import FOLDER as FLIGHT
from grpo_mega.platform.flight import Moment
from grpo_mega.show.console.columns import SECONDS, mean
from grpo_mega.show.console.panel import RECENT, Snapshot, Sparkline, draw_panel, extend_curves
from grpo_mega.show.traces.trace_files import moments_in

DONE, BAD_INPUT = 0, 2
STAGES = {"pretrain": "base.max_steps", "sft": "sft.steps", "": "run.steps"}
"""Stages in order, the last one without a name -> the setting with its number of steps."""
BETWEEN_STEPS = ("time/evaluate", "time/checkpoint", "time/export")
"""Metrics of time that is not part of `SECONDS`."""
MOST_BYTES = 1 << 30
"""Largest file of metrics that is read."""
STEP = "step"
"""Name of a step, which contains phases, in the flight recorder."""

Record = Mapping[str, Any]


def panel_of(run: Path, width: int, plain: bool = False) -> RenderableType:
    """The panel of a run directory, for rich to print.

    Raises:
        InputError: The directory has no run, or a file of it is damaged.
    """
    config, recorded = _object(run / CONFIG), _recorded(run)
    if not config and not recorded:
        what = f"has neither {CONFIG} nor {METRICS}" if run.exists() else f"does not exist{instead_of(run)}"
        raise InputError(str(run), what, "choose a run directory, such as runs/tiny")
    stage = next(reversed(recorded), "")
    curves: dict[str, Sparkline] = {}
    for record in recorded.get(stage, []):
        extend_curves(curves, record)
    alarms = risen(run / ALARMS_FILE)
    up = [f"{alarm['name']} since step {alarm['step']}" for alarm in alarms if alarm["cleared"] is None]
    return draw_panel(_snapshot(run, config, stage, recorded), curves, up, width, plain=plain)


def _snapshot(run: Path, config: Record, stage: str, recorded: Mapping[str, Sequence[Record]]) -> Snapshot:
    """The progress of the run, or how it ended."""
    steps = [record for record in recorded.get(stage, []) if not is_held_out(dict(record))]
    step = max((record["step"] for record in steps), default=0)
    total = _total(config, stage)
    recent = steps[-RECENT:]
    seconds = [record[SECONDS] for record in recent if SECONDS in record]
    spent = sum(
        record.get(name, 0.0)
        for records in recorded.values()
        for record in records
        for name in (SECONDS, *BETWEEN_STEPS)
    )
    summary, moments, lives = _object(run / SUMMARY), moments_in(run / FLIGHT / "rank-00000"), _lives(run)
    phase, phase_seconds = ("", 0.0) if summary else _phase(moments, lives)
    usual = median([record[f"time/{phase}"] for record in recent if f"time/{phase}" in record] or [0.0])
    return Snapshot(
        run.resolve().name, stage, step, total,
        elapsed=clock(spent),
        left=clock(mean(seconds) * max(total - step, 0)) if seconds and total is not None else "",
        phase=phase, phase_seconds=phase_seconds,
        phase_share=min(phase_seconds / usual, 1.0) if usual else None,
        phase_left=usual - phase_seconds if usual > phase_seconds else None,
        state=_state(run, summary, moments, lives),
    )  # fmt: skip


def _total(config: Record, stage: str) -> int | None:
    """Number of steps of a stage; None if no setting has it, as when it follows from epochs or from pairs."""
    trains = (config.get("run") or {}).get("trains", "policy")
    if not stage and trains != "policy":
        return None
    value: Any = config
    for word in STAGES[stage].split("."):
        value = value.get(word) if isinstance(value, dict) else None
    return value if isinstance(value, int) and not (stage == "sft" and value == 0) else None


def _lives(run: Path) -> bool | None:
    """Whether the process that uses, or used, the run directory still lives; None if this machine cannot tell."""
    try:
        text, since = contents(run / LOCK).decode(), (run / LOCK).stat().st_mtime
    except (OSError, ValueError):
        return None
    holder = re.fullmatch(r"pid (\d+) on (\S+)", text.strip())
    if holder is None or holder[2] != socket.gethostname():
        return None
    try:
        # A process that started after the lock was written is another one, to which the kernel has given the number.
        return psutil.Process(int(holder[1])).create_time() <= since + 1
    except psutil.Error:
        return False


def _state(run: Path, summary: Record, moments: Sequence[Moment], lives: bool | None) -> str:
    """How the run ended, with the error if one ended it; else its last sign of life, and where it would continue."""
    if ended := how_it_ended(summary):
        return ended
    state = "not complete, and its process is gone" if lives is False else "not complete"
    if lives is False and (error := last_error(run)):
        return f"{state}: {error}"
    if lives is False and has_checkpoints(run):
        state = "not running, continues at its newest checkpoint"
    return f"{state}, last sign of life {clock(max(time.time() - moments[-1].time, 0.0))} ago" if moments else state


def _phase(moments: Sequence[Moment], lives: bool | None) -> tuple[str, float]:
    """The phase that the main rank is in, or was in last, and its seconds; "" between phases.

    Seconds are counted until now if the process is known to live, else until its last sign of life.
    """
    inside = [name for name in moments[-1].inside if name != STEP] if moments else []
    if not inside:
        return "", 0.0
    phase, began = inside[0], moments[-1].time
    # Back to the phase's beginning, or to the oldest moment that the recorder, a ring, still holds.
    for moment in reversed(moments):
        if phase not in moment.open:
            break
        began = moment.time
        if moment.begins and phase not in moment.open[:-1]:
            break
    return phase, max((time.time() if lives else moments[-1].time) - began, 0.0)


def _recorded(run: Path) -> dict[str, list[dict[str, Any]]]:
    """Stage -> the numeric metrics of its steps, for the stages that have begun, in order."""
    files = {stage: run / (f"{stage}.jsonl" if stage else METRICS) for stage in STAGES}
    files = {stage: file for stage, file in files.items() if file.is_file()}
    for file in (*files.values(), run / ALARMS_FILE):
        if file.is_file() and file.stat().st_size > MOST_BYTES:
            raise InputError(str(file), f"has more than {MOST_BYTES:,} bytes", "shorten or remove it")
    return {
        stage: [
            {name: value for name, value in line.items() if finite(value) is not None} for line in read_metrics(file)
        ]
        for stage, file in files.items()
    }


def _object(file: Path) -> Record:
    """The object in a JSON or YAML file; {} without such a file."""
    if not file.exists():
        return {}
    try:
        return read_object(file)
    except ValueError as error:
        raise InputError(str(file), str(error), "restore or remove it") from None


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    options = parser.parse_args(arguments)
    width = shutil.get_terminal_size((81, 24)).columns - 1 if sys.stdout.isatty() else 80
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    try:
        with naming(f"a file of {options.run}"):
            console.print(panel_of(options.run, width, plain="utf" not in console.encoding))
    except (ValueError, OSError) as error:
        tell(f"error: {error}", sys.stderr)
        return BAD_INPUT
    return DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
