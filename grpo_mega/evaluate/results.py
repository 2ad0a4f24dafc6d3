"""Folder of an evaluation: complete parts until everything is finished.

    settings.json    settings that determine the samples
    parts/           samples of some problems each, while others are missing
    samples.jsonl    all samples, one per line, in the order of the problems
    results.json     the estimates
    curves.png       pass@k, maj@k and rm@k against k
    budgets.png      the accuracy against the tokens of a completion

A killed evaluation continues with the problems that no part has. Called on the main rank only.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from grpo_mega.errors import InputError
from grpo_mega.evaluate.measure import Values
from grpo_mega.evaluate.votes import Votes
from grpo_mega.platform.files import write_atomic
from grpo_mega.types import Group, Prompt, Sample, SampleInfo, Score

SETTINGS, PARTS, SAMPLES, RESULTS = "settings.json", "parts", "samples.jsonl", "results.json"
CURVES, BUDGETS = "curves.png", "budgets.png"
CONTINUES = "continues"
"""Key of settings.json for the checksum of the pool whose completions an evaluation continues, and the separators of
steps."""
Record = dict[str, Any]
"""A sample in the format of samples.jsonl."""


def open_folder(folder: Path, settings: dict[str, Any]) -> None:
    """Creates the folder, or continues one of the same settings (JSON values).

    Raises:
        InputError: The folder has results of other settings, which are named, or other content.
    """
    # Through JSON, so that tuples compare equal to the lists in the file.
    wanted = json.loads(json.dumps(settings))
    file = folder / SETTINGS
    if file.is_file():
        # Folders of earlier releases have no date: they count as of the day that is asked for.
        written = {"date": wanted.get("date")} | json.loads(file.read_text())
        differing = [name for name in sorted({*wanted, *written}) if wanted.get(name) != written.get(name)]
        if differing:
            lines = [f"\n  {name}: {_shown(written, name)} there, {_shown(wanted, name)} now" for name in differing]
            what = f"holds results of other settings:{''.join(lines)}\n"
            raise InputError(f"--out {folder}", what, "choose a different --out, or remove the folder")
        return
    if folder.exists() and (not folder.is_dir() or any(entry.name != f".{SETTINGS}.tmp" for entry in folder.iterdir())):
        what = f"exists but is not an evaluation folder (no {SETTINGS})"
        raise InputError(f"--out {folder}", what, "choose a different --out")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(file, json.dumps(wanted, indent=2) + "\n")


def begun_on(folder: Path) -> str | None:
    """Date that the prompts of the evaluation in this folder give as today's; None without a date or evaluation."""
    try:
        return json.loads((folder / SETTINGS).read_text()).get("date")
    except (OSError, ValueError, AttributeError):  # `open_folder` reports what is wrong with the folder
        return None


def missing(folder: Path, prompts: Sequence[Prompt]) -> list[int]:
    """Numbers of the problems that are in no part."""
    known = {record["problem"] for record in _records(folder)}
    return [number for number, prompt in enumerate(prompts) if prompt.id not in known]


def write_part(folder: Path, first: int, records: Sequence[Record]) -> None:
    """Writes all samples of some problems, the first of which has the number `first`."""
    (folder / PARTS).mkdir(exist_ok=True)
    write_atomic(folder / PARTS / f"problem-{first:06d}.jsonl", _lines(records))


def collect(folder: Path, prompts: Sequence[Prompt]) -> list[list[Record]]:
    """Samples of each problem in order, when no part is missing; merges the parts into samples.jsonl."""
    by_problem: dict[str, list[Record]] = {}
    for record in _records(folder):
        by_problem.setdefault(record["problem"], []).append(record)
    ordered = [sorted(by_problem[prompt.id], key=lambda record: record["index"]) for prompt in prompts]
    if not (folder / SAMPLES).is_file():
        write_atomic(folder / SAMPLES, _lines([record for records in ordered for record in records]))
    shutil.rmtree(folder / PARTS, ignore_errors=True)
    return ordered


def record_of(sample: Sample, info: SampleInfo, vote: int | None, within: Sequence[float | None] = ()) -> Record:
    """Record of a sample: its score, the number of the answer that it votes for, and its success within each budget."""
    score = info.score
    # The text alone does not show which parts are replies.
    made = {"calls": info.calls, "errors": info.errors}
    tokens = {"token_ids": [*sample.token_ids], "given": sample.given}
    tokens |= {"restarts": sample.restarts} if sample.restarts else {}
    # An agent's prompt has other messages than the problem.
    tokens |= {"prompt_ids": sample.prompt.token_ids} if sample.prompt.request else {}
    return {
        "problem": sample.prompt.id,
        "task": sample.prompt.task,
        "index": sample.index,
        "asked": sample.prompt.asked,
        "prompt": sample.prompt.text,
        "answer": sample.prompt.answer,
        "completion": sample.text,
        "tokens": info.sampled,
        "finish_reason": info.finish_reason,
        "reward": score.total,
        "terms": score.terms,
        "vote": vote,
        **({"opening": sample.prompt.opening} if sample.prompt.opening else {}),
        **(made | tokens if sample.calls else {}),
        **({"within": [*within]} if within else {}),
        **({"reason": score.reason} if score.reason else {}),
        **({"unscorable": score.unscorable} if score.unscorable else {}),
    }


def groups_of(prompts: Sequence[Prompt], records: Sequence[Sequence[Record]]) -> tuple[list[Group], Votes]:
    """What is known of the samples of each problem, and their votes, from its records."""
    groups = [
        Group(
            prompt,
            tuple(
                SampleInfo(
                    record["tokens"],
                    record["finish_reason"],
                    ((0, 0),),
                    Score(record["reward"], record["terms"], unscorable=record.get("unscorable", "")),
                    calls=record.get("calls", 0),
                    errors=record.get("errors", 0),
                )
                for record in of_prompt
            ),
        )
        for prompt, of_prompt in zip(prompts, records, strict=True)
    ]
    return groups, [[record["vote"] for record in of_prompt] for of_prompt in records]


def within_of(records: Sequence[Sequence[Record]], budgets: Sequence[int]) -> dict[int, Values]:
    """{budget: for each problem, success of its samples within the budget, without unscored ones}."""
    return {
        budget: [[value for record in group if (value := record["within"][i]) is not None] for group in records]
        for i, budget in enumerate(budgets)
    }


def write_results(folder: Path, results: dict[str, Any]) -> None:
    """Writes results.json, with estimates as objects."""
    write_atomic(folder / RESULTS, json.dumps(results, indent=2, default=asdict) + "\n")


def _records(folder: Path) -> list[Record]:
    files = [folder / SAMPLES] if (folder / SAMPLES).is_file() else sorted((folder / PARTS).glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def _lines(records: Sequence[Record]) -> str:
    return "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)


def _shown(settings: dict[str, Any], name: str) -> str:
    return json.dumps(settings[name]) if name in settings else "absent"
