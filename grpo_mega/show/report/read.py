"""Reads a run directory into plain data; missing or damaged files are noted, and the rest is read."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from grpo_mega.errors import InputError, instead_of
from grpo_mega.observe.alarm_log import ALARMS_FILE
from grpo_mega.observe.experts import EXPERTS
from grpo_mega.observe.foreign import MOST, contents, finite, read_object
from grpo_mega.observe.metrics import METRICS
from grpo_mega.observe.run_dir import CONFIG, IDENTITY, PLANNED, WORDS
from grpo_mega.observe.summary import SUMMARY
from grpo_mega.show.traces.lanes import Lanes, lanes
from grpo_mega.show.traces.trace_files import ranks_of, read_traces, size_of, steps_of
from grpo_mega.show.traces.waterfall import Waterfall, waterfall

Record = dict[str, Any]
Metrics = dict[int, dict[str, float]]
"""Step -> name -> value; only finite numbers."""

OF_A_RUN = (CONFIG, IDENTITY, METRICS, SUMMARY)
"""Files of which any one makes a folder a run directory."""


@dataclass(frozen=True)
class StageData:
    """A stage before the last one: its description, and the prefix of the metrics that only this stage has."""

    words: str
    prefix: str


STAGES = {
    "pretrain": StageData("the base model's training", "base/"),
    "sft": StageData("supervised fine-tuning", "sft/"),
}
"""Stages before the last one, in order; each writes its own file of metrics, such as sft.jsonl."""
FOLLOWED = "followed"
TRACED_RANKS, TRACED_STEPS, LANE_STEPS = 8, 5, 2
"""Largest numbers of ranks, and of steps in the waterfall and in the lanes: reading all traces would take minutes."""
TRACES_BUDGET = 1 << 28
"""Largest number of bytes of traces that are read, of fewer ranks if need be."""
OF_METRICS, OF_LINES, LINE_BYTES = (1 << 28, 1_000_000), (1 << 26, 50_000), 1 << 25
"""Largest numbers of bytes and lines that are read of a file of metrics and of another JSON Lines file, and of bytes in
a line; what comes after is left out."""
MOST_NAMES, MOST_NAME, MOST_ALARMS, MOST_NOTES = 4096, 200, 2000, 1000
"""Largest numbers of metrics, of characters of the name of one, of alarms, and of notes on what cannot be read."""
SAMPLES_BUDGET = 6_000_000
"""Largest number of bytes of samples that are read, and again for the problems that are followed."""


@dataclass(frozen=True)
class StepSamples:
    """The completions in a file of samples/, as groups of completions of one problem each."""

    step: int
    groups: list[list[Record]]


@dataclass
class Samples:
    """Completions of some steps.

    Attributes:
        steps: The completions of the files that were read, in the order of steps.
        files: Number of files, some of which are not read if they are too large.
        lines: Number of completions in the files that were read.
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
        samples: Completions that steps learned from.
        followed: Completions of the problems that are followed over all of training.
        missing: Missing files, in words.
        damaged: Unreadable files and lines, each as "FILE:LINE: why"; at most `MOST_NOTES`.
        damaged_more: Number of further such notes.
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
    damaged_more: int = 0
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

    def note(self, what: str) -> None:
        """Notes an unreadable file or line."""
        if len(self.damaged) < MOST_NOTES:
            self.damaged.append(what)
        else:
            self.damaged_more += 1


def read_run(path: Path) -> RunData:
    """Reads the run directory.

    Raises:
        InputError: It is not a run directory.
    """
    if not path.is_dir() or not any((path / name).is_file() for name in OF_A_RUN):
        what = "not a folder" if not path.is_dir() else f"none of {', '.join(OF_A_RUN)} is in it"
        what = f"not a run directory ({what})" if path.exists() else f"does not exist{instead_of(path)}"
        raise InputError(str(path), what, "choose a folder such as runs/tiny")
    run = RunData(path)
    run.config = _read_object(run, CONFIG, "the settings of the run are unknown")
    run.words = _words(run)
    run.summary = _read_object(run, SUMMARY, "the run is still going, or was stopped before its end")
    if not (path / METRICS).is_file():
        run.missing.append(f"{METRICS}: no step of the last stage has been recorded")
    run.metrics = _metrics(run, METRICS)
    run.stages = {name: _metrics(run, f"{name}.jsonl") for name in STAGES if _is_there(run, path / f"{name}.jsonl")}
    run.alarms = _alarms(run)
    run.samples = _samples(run, "step")
    run.followed = _samples(run, FOLLOWED)
    run.experts = [*_lines(run, EXPERTS)]
    if _is_there(run, path / PLANNED):
        run.planned = _read_object(run, PLANNED, "")
    run.waterfall, run.lanes = _traced(run)
    settings = run.config.get("run")
    of_run = settings if isinstance(settings, dict) else {}
    writes_samples = of_run.get("trains", "policy") == "policy" and of_run.get("sample_groups_per_step") != 0
    if not run.samples.files and writes_samples:
        run.missing.append("samples/: no completions were recorded")
    return run


def _traced(run: RunData) -> tuple[Waterfall | None, Lanes | None]:
    """Waterfall of the newest `TRACED_STEPS` traced steps and lanes of the newest `LANE_STEPS`; None without traces.

    Of the ranks, at most `TRACED_RANKS` are read, evenly spread.
    """
    path, ranks = run.path, ranks_of(run.path)
    run.traced = len(ranks)
    try:
        # Every n-th rank, n rounded up so that there are at most TRACED_RANKS.
        sizes = {rank: size_of(path, rank) for rank in ranks[:: -(-len(ranks) // TRACED_RANKS) or 1]}
        chosen = evenly(sizes, TRACES_BUDGET)
        traces = read_traces(path, chosen) if chosen else []
        newest = max((step for trace in traces for step in steps_of(trace)), default=0)
        if not traces:
            return None, None
        after = newest + 1
        return waterfall(traces, range(after - TRACED_STEPS, after)), lanes(traces, range(after - LANE_STEPS, after))
    # A damaged trace, or one of another version, must not prevent the page.
    except Exception as error:
        run.note(f"{path}: its traces cannot be read: {error!r:.200}")
        return None, None


def _is_there(run: RunData, file: Path) -> bool:
    """Whether a path is a file; anything else, such as a pipe or a link to nothing, is noted."""
    if not file.is_file() and (file.is_symlink() or file.exists()):
        run.note(f"{file}: is not a file, left out")
    return file.is_file()


def _read_object(run: RunData, name: str, without: str) -> Record:
    """The object in a JSON or YAML file; {} and a note if the file is absent or damaged."""
    file = run.path / name
    if not _is_there(run, file):
        run.missing.append(f"{name}: {without}")
        return {}
    try:
        return read_object(file)
    except (ValueError, OSError) as error:
        run.note(f"{file}: {error}")
        return {}


def _words(run: RunData) -> list[str] | None:
    """The list of words in words.json; None without a valid one, as earlier versions wrote none."""
    file = run.path / WORDS
    try:
        found = json.loads(contents(file).decode(errors="replace")) if _is_there(run, file) else None
    except (ValueError, OSError, RecursionError) as error:
        run.note(f"{file}: cannot be read: {' '.join(str(error).split())[:200]}")
        return None
    return [str(word) for word in found] if isinstance(found, list) else None


def _lines(run: RunData, name: str, most: tuple[int, int] = OF_LINES) -> Iterator[Record]:
    """Yields the objects in the first (bytes, lines) `most` of a JSON Lines file; invalid lines are noted."""
    file = run.path / name
    if not _is_there(run, file):
        return
    try:
        with file.open("rb") as opened:
            yield from _objects(run, file, opened, most)
    except OSError as error:
        run.note(f"{file}: cannot be read: {error.strerror}")


def _objects(run: RunData, file: Path, opened: BinaryIO, most: tuple[int, int]) -> Iterator[Record]:
    """Yields the objects in the lines of an open file; see `_lines`."""
    number = 0
    # Bounded, as a damaged file may be a single line of any size.
    while line := opened.readline(LINE_BYTES):
        number += 1
        if opened.tell() > most[0] or number > most[1] or len(line) == LINE_BYTES:
            run.note(f"{file}:{number}: the file or this line is too long, what comes after is left out")
            return
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            what = "not JSON" if line.endswith(b"\n") else "half-written last line"
            run.note(f"{file}:{number}: {what}, left out")
            continue
        if isinstance(record, dict):
            yield record
        else:
            run.note(f"{file}:{number}: not a JSON object, left out")


def _metrics(run: RunData, name: str) -> Metrics:
    """Step -> values, from a file of metrics; several lines of one step, as with held-out results, are merged."""
    found: Metrics = {}
    names: set[str] = set()
    file, large, strange = run.path / name, 0, 0
    for record in _lines(run, name, OF_METRICS):
        step = record.pop("step", None)
        # JavaScript holds whole numbers up to 2**53 exactly. In Python, True is an int as well.
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**53:
            run.note(f"{file}: a line has no step that is a whole number, left out")
            continue
        of_step = found.setdefault(step, {})
        for key, given in record.items():
            if (value := finite(given)) is None:
                large += isinstance(given, (int, float)) and abs(given) > MOST
            elif key in names or (len(names) < MOST_NAMES and len(key) <= MOST_NAME):
                # One string a name instead of one a line: a file may have a million lines.
                key = sys.intern(key)
                names.add(key)
                of_step[key] = value
            else:
                strange += 1
    if large:
        run.note(f"{file}: {large} numbers beyond {MOST:g}, left out")
    if strange:
        run.note(f"{file}: {strange} values of more than {MOST_NAMES} metrics or with long names, left out")
    return dict(sorted(found.items()))


def _alarms(run: RunData) -> list[Record]:
    """The first `MOST_ALARMS` records of alarms."""
    alarms = [*_lines(run, ALARMS_FILE)]
    known = [each for each in alarms if isinstance(each.get("name"), str) and finite(each.get("step")) is not None]
    if strange := len(alarms) - len(known):
        run.note(f"{run.path / ALARMS_FILE}: {strange} without a name or a step, left out")
    if more := len(known[MOST_ALARMS:]):
        run.note(f"{run.path / ALARMS_FILE}: {more} after the first {MOST_ALARMS}, left out")
    return known[:MOST_ALARMS]


def _samples(run: RunData, prefix: str) -> Samples:
    """The completions in samples/PREFIX-NNNNNN.jsonl, of the steps that `evenly` chooses if all files are too large."""
    files = {}
    for file in sorted((run.path / "samples").glob(f"{prefix}-*.jsonl")):
        number = file.stem.removeprefix(f"{prefix}-")
        if number.isascii() and number.isdigit() and int(number) < 2**53 and _is_there(run, file):
            files[int(number)] = file
    sizes = {step: file.stat().st_size for step, file in sorted(files.items())}
    found = Samples(files=len(files))
    for step in evenly(sizes, SAMPLES_BUDGET):
        records = [*_lines(run, str(files[step].relative_to(run.path)))]
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
        # The next guess takes all files to be as large as these; it shrinks by at least one, so the loop ends.
        count = max(1, min(count - 1, count * budget // total))
    return steps[-1:]


def groups_of(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Group -> its records; a group is a number in the file, or the problem in files of versions without numbers."""
    found: dict[str, list[Record]] = {}
    for record in records:
        key = f"group {record['group']}" if "group" in record else f"problem {record.get('prompt_id')}"
        found.setdefault(key, []).append(record)
    return found
