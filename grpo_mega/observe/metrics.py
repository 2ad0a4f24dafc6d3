"""Writes and reads the metrics of every step: metrics.jsonl, one JSON object a line, and TensorBoard scalars.

Earlier stages of a run write their own files, such as pretrain.jsonl.
"""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path
from typing import Any

from grpo_mega.errors import InputError
from grpo_mega.observe.logs import OnlyShows
from grpo_mega.observe.metric_table import unknown
from grpo_mega.platform.files import write_atomic

METRICS = "metrics.jsonl"
HELD_OUT = "eval/heldout/"
"""Prefix of the names of held-out results, which are written as separate lines at step 0 and at the last step."""

logger = logging.getLogger(__name__)

SHOWN = 10
"""Largest number of lost steps that a warning names."""


class MetricsLog:
    """Appends the metrics of a run; a resumed run continues where its checkpoint was, without duplicate lines."""

    def __init__(self, run_dir_path: Path, tensorboard: bool, resume_from_step: int, name: str = METRICS) -> None:
        """Opens a log of a run directory.

        Args:
            run_dir_path: The run directory.
            tensorboard: Write event files to tensorboard/ as well.
            resume_from_step: Last step of the checkpoint: lines of later steps are removed because these steps
                run again. -1 when the run starts from the beginning: everything is removed.
            name: Name of the file; each file has its own TensorBoard events.
        """
        path = run_dir_path / name
        if path.exists():
            trim(path, resume_from_step)
        records = [record for _, record in _parse(path)] if path.exists() else []
        recorded = {record["step"] for record in records if not is_held_out(record)}
        # The steps before the checkpoint do not run again, so their metrics stay lost.
        if lost := [step for step in range(1, resume_from_step + 1) if step not in recorded]:
            named = ", ".join(map(str, lost[:SHOWN])) + (f" and {len(lost) - SHOWN} more" if len(lost) > SHOWN else "")
            logger.warning("%s: the metrics of step %s are lost; the run continues without them", path, named)
        self._unexplained: set[str] = set()
        self._path, self._file = path, path.open("a")
        self._only_shows = OnlyShows()
        self._writer: Any = None
        with self._only_shows("run.tensorboard"):
            if tensorboard:
                # Imported here: it takes a second.
                from torch.utils.tensorboard import SummaryWriter

                folder = run_dir_path / "tensorboard"
                # Events of steps that run again are hidden.
                hidden_from = resume_from_step + 1
                self._writer = SummaryWriter(folder if name == METRICS else folder / path.stem, purge_step=hidden_from)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Writes one line {"step": step, **metrics}; a value that is not finite becomes null, with a warning.

        Raises:
            FileNotFoundError: The run directory was moved or replaced: later lines would be lost.
        """
        self._check_place()
        if "step" in metrics:
            raise ValueError("a metric must not be called 'step': rename it, for example 'time/step'")
        # Names that the table lacks: tests find them, and a run goes on.
        for name in unknown(metrics):
            if name not in self._unexplained:
                self._unexplained.add(name)
                logger.warning(
                    "docs/metrics.md does not explain the metric %s: add it to observe/metric_table.py", name
                )
        values: dict[str, float | None] = {}
        for name, value in metrics.items():
            values[name] = float(value) if math.isfinite(value) else None
            if values[name] is None:
                logger.warning("step %d: metric %s is %s, written as null", step, name, float(value))
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        # A checkpoint after this step may survive a crash of the machine, and relies on the line.
        os.fsync(self._file.fileno())
        with self._only_shows("run.tensorboard"):
            for name, known in values.items() if self._writer else ():
                if known is not None:
                    self._writer.add_scalar(name, known, step)

    def _check_place(self) -> None:
        try:
            same = os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except FileNotFoundError:
            same = False
        if not same:
            raise FileNotFoundError(
                f"{self._path} is no longer the file that this run writes: its directory was moved or replaced during "
                "the run; move it back, and start the same command again"
            )

    def close(self) -> None:
        """Closes the files; TensorBoard's events are complete only then."""
        self._file.close()
        with self._only_shows("run.tensorboard"):
            if self._writer:
                self._writer.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a half-written last line is dropped with a warning.

    Raises:
        InputError: Another line is not a JSON object with an integer "step".
    """
    return [record for _, record in _parse(path)]


def _parse(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Each line of the file without its newline, and the record in it."""
    lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
    parsed = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            parsed.append((line, record))
        elif number < len(lines):
            raise InputError(f"{path}:{number}", "not a JSON object with a step", "remove the line")
        elif line:
            logger.warning("%s:%d: dropped a half-written last line", path, number)
    return parsed


def trim(path: Path, last_step: int) -> None:
    """Removes lines of later steps, a half-written last line, and held-out results of a former last step."""
    lines = [(line, record) for line, record in _parse(path) if record["step"] <= last_step]
    kept = b"".join(line + b"\n" for line, record in lines if not (record["step"] and is_held_out(record)))
    if kept != path.read_bytes():
        write_atomic(path, kept)


def is_held_out(record: dict[str, Any]) -> bool:
    """Whether a line of metrics.jsonl has held-out results instead of a step's metrics."""
    return any(name.startswith(HELD_OUT) for name in record)
