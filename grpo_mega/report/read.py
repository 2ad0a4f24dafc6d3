"""Reads a run directory, whole or not, into plain data: what is absent or damaged is noted, and the rest is read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from grpo_mega.observe.alarm_log import ALARMS_FILE
from grpo_mega.observe.experts import EXPERTS
from grpo_mega.observe.lanes import Lanes, lanes
from grpo_mega.observe.metrics import METRICS
from grpo_mega.observe.prediction import PLANNED
from grpo_mega.observe.summary import SUMMARY
from grpo_mega.observe.trace_files import ranks_of, read_traces, steps_of
from grpo_mega.observe.waterfall import Waterfall, waterfall

Record = dict[str, Any]
Metrics = dict[int, dict[str, float]]
"""Step -> name -> value; only finite numbers."""

OF_A_RUN = ("config.yaml", "run.json", METRICS, SUMMARY)
"""Files of which any one makes a folder a run directory. The first two are those of observe/run_dir.py, which takes
seconds to import."""


@dataclass(frozen=True)
class Stage:
    """A stage before the last one: its description, and the prefix of the metrics that only this stage has."""

    words: str
    prefix: str


STAGES = {"pretrain": Stage("the base model's training", "base/"), "sft": Stage("supervised fine-tuning", "sft/")}
"""Stages before the last one, in their order; each has a file of metrics of its own, such as sft.jsonl."""
FOLLOWED = "followed"
TRACED_RANKS, TRACED_STEPS, LANE_STEPS = 8, 5, 2
"""Largest numbers of ranks, and of steps in the waterfall and in the lanes: reading all traces would take minutes."""
SAMPLES_BUDGET = 6_000_000
"""Largest number of bytes of samples that are read, and again for the problems that are followed."""


@dataclass(frozen=True)
class StepSamples:
    """The answers in a file of samples/, as groups of answers to one problem each."""

    step: int
    groups: list[list[Record]]


@dataclass
class Samples:
    """Answers of some steps.

    Attributes:
        steps: The answers of the files that were read, in the order of steps.
        files: Number of files, some of which are not read if they are too large.
        lines: Number of answers in the files that were read.
    """

    steps: list[StepSamples] = field(default_factory=list)
    files: int = 0
    lines: int = 0


@dataclass
class RunData:
    """What a run directory holds.

    Attributes:
        path: The directory.
        config: The resolved configuration, nested; {} without one.
        metrics: Metrics of the run's last stage.
        stages: Metrics of earlier stages, by name.
        alarms: Alarms that rose or cleared, in the order of the file.
        summary: The summary; {} while there is none.
        samples: Answers that steps learned from.
        followed: Answers to the problems that are followed over all of training.
        missing: What the directory lacks, in words.
        damaged: What cannot be read, each as "FILE:LINE: why".
        waterfall: Where the time of traced steps goes; None without traces.
        lanes: What the ranks did in the newest of these steps; None without traces.
        traced: Number of ranks that have left a trace, of which at most `TRACED_RANKS` were read.
        experts: The lines of experts.jsonl.
        planned: Content of planned.json, planned and measured figures of some steps; {} if they were not compared.
        words: Arguments of the command that started the run; None if unknown.
    """

    path: Path
    config: Record = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)
    stages: dict[str, Metrics] = field(default_factory=dict)
    alarms: list[Record] = field(default_factory=list)
    summary: Record = field(default_factory=dict)
    samples: Samples = field(default_factory=Samples)
    followed: Samples = field(default_factory=Samples)
    missing: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    waterfall: Waterfall | None = None
    lanes: Lanes | None = None
    traced: int = 0
    words: list[str] | None = None
    experts: list[Record] = field(default_factory=list)
    planned: Record = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The directory's name, which may differ from `run.name` since it was renamed."""
        return self.path.resolve().name


def read_run(path: Path) -> RunData:
    """Reads the run directory.

    Raises:
        ValueError: It is not a run directory; says what one holds.
    """
    if not path.is_dir() or not any((path / name).is_file() for name in OF_A_RUN):
        what = "not a folder" if not path.is_dir() else f"none of {', '.join(OF_A_RUN)} is in it"
        raise ValueError(f"{path} is no run directory ({what}): name a folder such as runs/tiny")
    run = RunData(path)
    run.config = _read_object(run, "config.yaml", "which settings the run had is not known")
    run.words = _words(run)
    run.summary = _read_object(run, SUMMARY, "the run is still going, or was stopped before its end")
    if not (path / METRICS).is_file():
        run.missing.append(f"{METRICS}: no step of the last stage has been recorded")
    run.metrics = _metrics(run, METRICS)
    run.stages = {name: _metrics(run, f"{name}.jsonl") for name in STAGES if (path / f"{name}.jsonl").is_file()}
    alarms = _lines(run, ALARMS_FILE)
    run.alarms = [record for record in alarms if _is_alarm(record)]
    if strange := len(alarms) - len(run.alarms):
        run.damaged.append(f"{path / ALARMS_FILE}: {strange} without a name or a step, left out")
    run.samples = _samples(run, "step")
    run.followed = _samples(run, FOLLOWED)
    run.experts = _lines(run, EXPERTS)
    if (path / PLANNED).is_file():
        run.planned = _read_object(run, PLANNED, "")
    run.waterfall, run.lanes = _traced(run)
    if not run.samples.files and _writes_samples(run.config):
        run.missing.append("samples/: no answers were recorded")
    return run


def _traced(run: RunData) -> tuple[Waterfall | None, Lanes | None]:
    """Waterfall of the newest `TRACED_STEPS` traced steps and lanes of the newest `LANE_STEPS`; None without traces.

    Of the ranks, at most `TRACED_RANKS` are read, evenly spread.
    """
    path, ranks = run.path, ranks_of(run.path)
    run.traced = len(ranks)
    chosen = ranks[:: -(-len(ranks) // TRACED_RANKS)] if ranks else []
    try:
        traces = read_traces(path, chosen) if chosen else []
        newest = max((step for trace in traces for step in steps_of(trace)), default=0)
        if not traces:
            return None, None
        after = newest + 1
        return waterfall(traces, range(after - TRACED_STEPS, after)), lanes(traces, range(after - LANE_STEPS, after))
    except Exception as error:  # a damaged trace, or one of another version, must not prevent the page
        run.damaged.append(f"{path}: its traces cannot be read: {error!r}")
        return None, None


def finite(value: object) -> float | None:
    """The value as a finite number; None for anything else, true and false included."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _read_object(run: RunData, name: str, without: str) -> Record:
    """The object in a JSON or YAML file; {} and a note if the file is absent or damaged."""
    file = run.path / name
    if not file.is_file():
        run.missing.append(f"{name}: {without}")
        return {}
    try:
        text = file.read_text(errors="replace")
        found = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, OSError, RecursionError, yaml.YAMLError) as error:
        run.damaged.append(f"{file}: cannot be read: {' '.join(str(error).split())[:200]}")
        return {}
    if not isinstance(found, dict):
        run.damaged.append(f"{file}: holds no object")
        return {}
    return found


def _words(run: RunData) -> list[str] | None:
    """The list of words in words.json; None without a valid one, as earlier versions wrote none."""
    file = run.path / "words.json"
    try:
        found = json.loads(file.read_text(errors="replace")) if file.is_file() else None
    except (ValueError, OSError, RecursionError) as error:
        run.damaged.append(f"{file}: cannot be read: {' '.join(str(error).split())[:200]}")
        return None
    return [str(word) for word in found] if isinstance(found, list) else None


def _lines(run: RunData, name: str) -> list[Record]:
    """The objects of a JSON Lines file, without invalid lines; empty without a file."""
    file = run.path / name
    if not file.is_file():
        return []
    found = []
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        run.damaged.append(f"{file}: cannot be read: {error.strerror}")
        return []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            last = number == len(lines)  # a whole line ends with a newline
            run.damaged.append(f"{file}:{number}: {'half-written last line' if last else 'not JSON'}, left out")
            continue
        if isinstance(record, dict):
            found.append(record)
        else:
            run.damaged.append(f"{file}:{number}: not a JSON object, left out")
    return found


def _metrics(run: RunData, name: str) -> Metrics:
    """Step -> values, from a file of metrics; several lines of one step, as with held-out results, are merged."""
    found: Metrics = {}
    for record in _lines(run, name):
        step = record.get("step")
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**53:
            run.damaged.append(f"{run.path / name}: a line has no step that is a whole number, left out")
            continue
        values = ((key, finite(value)) for key, value in record.items() if key != "step")
        found.setdefault(step, {}).update({key: value for key, value in values if value is not None})
    return dict(sorted(found.items()))


def _writes_samples(config: Record) -> bool:
    """Whether the steps of a run with this configuration write answers: if it trains a policy, with samples kept."""
    settings = config.get("run")
    of_run = settings if isinstance(settings, dict) else {}
    return of_run.get("trains", "policy") == "policy" and of_run.get("sample_groups_per_step") != 0


def _is_alarm(record: Record) -> bool:
    return isinstance(record.get("name"), str) and finite(record.get("step")) is not None


def _samples(run: RunData, prefix: str) -> Samples:
    """The answers in samples/PREFIX-NNNNNN.jsonl, of the steps that `evenly` chooses if all files are too large."""
    files = {}
    for file in sorted((run.path / "samples").glob(f"{prefix}-*.jsonl")):
        number = file.stem.removeprefix(f"{prefix}-")
        if number.isascii() and number.isdigit():
            files[int(number)] = file
    sizes = {step: file.stat().st_size for step, file in sorted(files.items())}
    found = Samples(files=len(files))
    for step in evenly(sizes, SAMPLES_BUDGET):
        records = _lines(run, str(files[step].relative_to(run.path)))
        found.steps.append(StepSamples(step, list(groups_of(records).values())))
        found.lines += len(records)
    return found


def evenly(sizes: dict[int, int], budget: int) -> list[int]:
    """Evenly spread steps, the first and the last included, whose sizes add up to at most `budget`; at least one."""
    steps = list(sizes)
    count = len(steps)
    while count > 1:
        chosen = [steps[index * (len(steps) - 1) // (count - 1)] for index in range(count)]
        total = sum(sizes[step] for step in chosen)
        if total <= budget:
            return chosen
        count = max(1, min(count - 1, count * budget // total))
    return steps[-1:]


def groups_of(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Group -> its records; a group is a number in the file, or the problem in files of versions without numbers."""
    found: dict[str, list[Record]] = {}
    for record in records:
        key = f"group {record['group']}" if "group" in record else f"problem {record.get('prompt_id')}"
        found.setdefault(key, []).append(record)
    return found
