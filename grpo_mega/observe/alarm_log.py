"""Keeps track of alarms, and writes alarms.jsonl: one line when an alarm rises, and one when it is over.

Which alarms are up follows from the lines of metrics.jsonl and from the thresholds (`alarms.py`). A run that continues
reads those lines again: with the same thresholds the file is that of a run that was never stopped; with others, records
say what changes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_mega.config.schema import AlarmsConfig
from grpo_mega.observe.alarm_history import History
from grpo_mega.observe.alarms import ALARMS, Alarm, Found
from grpo_mega.observe.logs import OnlyShows
from grpo_mega.observe.metrics import METRICS, is_held_out, read_metrics, trim

ALARMS_FILE = "alarms.jsonl"
SHOWN, SHOWN_CHARACTERS = 3, 80
"""Number of samples that an alarm shows, and of characters of each."""
QUIET = 5
"""Consecutive steps without its condition after which an alarm is over."""


class AlarmLog:
    """The alarms of a run.

    Attributes:
        changed: Records made because the thresholds of this start differ from those of the start before.
    """

    def __init__(self, run_dir_path: Path, limits: AlarmsConfig, resume_from_step: int) -> None:
        """Continues the file of a run directory.

        Args:
            run_dir_path: The run directory, whose metrics.jsonl ends with the step `resume_from_step`.
            limits: The thresholds.
            resume_from_step: Last step of the checkpoint: what later steps have raised is removed, as they run again.
                -1 when the run starts from the beginning: everything is removed.
        """
        self._path = run_dir_path / ALARMS_FILE
        self._only_shows = OnlyShows()
        self._state = AlarmState(limits)
        metrics = run_dir_path / METRICS
        for line in read_metrics(metrics) if metrics.exists() else ():
            if not is_held_out(line):
                self._state.after(line["step"], {name: x for name, x in line.items() if name != "step"})
        self.changed: list[dict[str, Any]] = []
        # Which alarms are up, and may stop the run, does not depend on the file.
        with self._only_shows(ALARMS_FILE):
            if self._path.exists():
                trim(self._path, resume_from_step)
            recorded = {alarm["name"]: alarm for alarm in self.summary() if alarm["cleared"] is None}
            rose = [{**record, "step": resume_from_step} for name, record in self.up.items() if name not in recorded]
            self.changed = [*rose, *(over(resume_from_step, name) for name in recorded if name not in self.up)]
            self._write(self.changed)

    @property
    def up(self) -> dict[str, dict[str, Any]]:
        """Name -> the record of the rise of each alarm that is up."""
        return self._state.up

    def step(
        self, step: int, metrics: dict[str, float], samples: Sequence[dict[str, Any]] = ()
    ) -> list[dict[str, Any]]:
        """Adds the metrics of a step; writes and returns the records of alarms that rise or are over with it.

        Some of the step's `samples`, records of samples/, show what an alarm about them means.
        """
        records = self._state.after(step, metrics)
        for record in records:
            if record["name"] == "never_right" and not record.get("cleared"):
                with self._only_shows("samples in an alarm"):
                    # One sample from each prompt; with fewer prompts than are shown, more samples from them.
                    firsts = {sample["prompt_id"]: sample for sample in reversed(samples)}
                    others = [sample for sample in samples if sample is not firsts[sample["prompt_id"]]]
                    told = [*reversed(firsts.values()), *others][:SHOWN]
                    record["message"] += "".join(f"; {_in_short(sample)}" for sample in told)
        with self._only_shows(ALARMS_FILE):
            self._write(records)
        return records

    def summary(self) -> list[dict[str, Any]]:
        """Each rise of an alarm so far; see `risen`."""
        return risen(self._path)

    def _write(self, records: Sequence[dict[str, Any]]) -> None:
        """Appends records; they are on disk when a checkpoint of their step is."""
        if not records:
            return
        with self._path.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
            file.flush()
            os.fsync(file.fileno())


def _in_short(sample: dict[str, Any]) -> str:
    """The end of a sample's completion, the answer of its problem, and what its reward says of it."""
    end = sample["completion"][-SHOWN_CHARACTERS:]
    dots = "..." if len(end) < len(sample["completion"]) else ""
    said = sample.get("reason") or sample.get("unscorable") or f"reward {sample['reward']}"
    return f"{sample['prompt_id']}, whose answer is {sample['answer'][:SHOWN_CHARACTERS]!r}: {dots}{end!r} ({said})"


def risen(file: Path) -> list[dict[str, Any]]:
    """Each rise in an alarms.jsonl, which may be missing, as {"name", "step", "cleared"}; "cleared" is the step with
    which the alarm was over, or None."""
    found: list[dict[str, Any]] = []
    for record in read_metrics(file) if file.is_file() else ():
        if not record.get("cleared"):
            found.append({"name": record["name"], "step": record["step"], "cleared": None})
            continue
        for alarm in found:
            if alarm["name"] == record["name"] and alarm["cleared"] is None:
                alarm["cleared"] = record["step"]
    return found


class AlarmState:
    """The alarms that are up after the steps so far.

    Attributes:
        up: Name of an alarm that is up -> the record of its rise.
    """

    def __init__(self, limits: AlarmsConfig) -> None:
        """Starts before the first step, with the thresholds `limits`."""
        self._limits = limits
        self._history = History()
        self._only_shows = OnlyShows()
        self._quiet: dict[str, int] = {}
        self.up: dict[str, dict[str, Any]] = {}

    def after(self, step: int, metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Adds the metrics of a step; returns a record, as in alarms.jsonl, of each alarm that rises or is over."""
        self._history.add(metrics)
        records = []
        for alarm in ALARMS:
            threshold = getattr(self._limits, alarm.name)
            found = None
            if threshold is not None:
                # An alarm that fails has not risen, and stops nothing.
                with self._only_shows(f"the alarm {alarm.name}"):
                    found = alarm.find(self._history, self._limits)
            if found:
                self._quiet[alarm.name] = 0
                if alarm.name not in self.up:
                    self.up[alarm.name] = _risen(step, alarm, found, threshold)
                    records.append(self.up[alarm.name])
            elif alarm.name in self.up:
                self._quiet[alarm.name] += 1
                if self._quiet[alarm.name] == QUIET:
                    del self.up[alarm.name]
                    records.append(over(step, alarm.name))
        return records


def _risen(step: int, alarm: Alarm, found: Found, threshold: float) -> dict[str, Any]:
    return {
        "step": step,
        "name": alarm.name,
        "value": found.value if math.isfinite(found.value) else None,
        "threshold": threshold,
        "message": found.message,
        "action": alarm.action,
    }


def over(step: int, name: str) -> dict[str, Any]:
    """The record of an alarm that is over with this step."""
    return {"step": step, "name": name, "cleared": True}
