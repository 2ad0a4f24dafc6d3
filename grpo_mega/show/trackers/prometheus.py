"""The newest metrics as a file for Prometheus' node exporter (its textfile collector), replaced at every step.

The format is the text format 0.0.4 of Prometheus: three lines a metric, so that a library would save nothing but the
rename, which `platform/files.py` does with a flush to the disk.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_mega.observe.metric_table import find
from grpo_mega.observe.recorder import Observer
from grpo_mega.platform.files import write_atomic


class Prometheus(Observer):
    """Writes the file after each step of the last stage."""

    def __init__(self, folder: Path, run: str) -> None:
        self._folder, self._run, self._last = folder, run, False

    def stage(self, name: str, step: int, steps: int) -> None:
        """Notes whether this is the last stage."""
        self._last = not name

    def step(self, step: int, metrics: dict[str, float], shown: Sequence[dict[str, Any]]) -> None:
        """Replaces the file."""
        if self._last:
            write_prometheus(self._folder, self._run, step, metrics)


def write_prometheus(folder: Path, run: str, step: int, metrics: Mapping[str, float | None]) -> None:
    """Writes grpo_mega_RUN.prom, atomically, into an existing folder.

    Raises:
        OSError: The file cannot be written.
    """
    write_atomic(folder / f"grpo_mega_{run}.prom", prometheus_text(run, {"step": step, **metrics}))


def prometheus_text(run: str, metrics: Mapping[str, float | None]) -> str:
    """A gauge for each metric, with the metric's name as a label, as several may get the same Prometheus name."""
    families: dict[str, list[str]] = {}
    for name, value in metrics.items():
        if value is None:
            continue
        family = "grpo_mega_" + re.sub(r"[^A-Za-z0-9_]", "_", name)
        known = find(name)
        help_ = f"{known.meaning} [{known.unit or 'a pure number'}]" if known else name
        head = [f"# HELP {family} {_escaped(help_)}", f"# TYPE {family} gauge"]
        line = f'{family}{{run="{_quoted(run)}",metric="{_quoted(name)}"}} {float(value)!r}'
        families.setdefault(family, head).append(line)
    return "".join(line + "\n" for lines in families.values() for line in lines)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', '\\"')
