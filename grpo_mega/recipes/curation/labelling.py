"""Labels of steps for a process reward model, from scored samples: by a verifier of steps, or by continuations."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_mega.config.schema.terms import NoOptions
from grpo_mega.errors import InputError
from grpo_mega.evaluate.results import Record
from grpo_mega.recipes.curation.continuing import Continued
from grpo_mega.recipes.curation.selection import SampleFilters, SamplePool, check_terms, noted, problem_of, records_of
from grpo_mega.reward.steps import sum_steps
from grpo_mega.step_ends import step_ends
from grpo_mega.types import Prompt, Sample

SUM_SEPARATORS = (";", "</think>")
"""Separators of the steps and the answer of a worked chain sum, to be used as `pairs.separators`."""


@dataclass
class StepSelection:
    """Labelled samples, and counts of the others.

    Attributes:
        rows: Rows of `pairs.path` for a process reward model, each with its origin.
        problems: Number of problems.
        labelled: Number of problems with a row.
        samples: Number of all samples.
        left_out: {reason: number of samples}.
        compared: Result of `compare`, of labels from elsewhere; {} without these.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    problems: int = 0
    labelled: int = 0
    samples: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    compared: dict[str, Any] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Summary of the counts, as lines of text."""
        labels = [label for row in self.rows for label in row["labels"]]
        return [
            f"{self.samples:,} samples of {self.problems:,} problems",
            *(f"  {number:,} {why}" for why, number in self.left_out.items()),
            f"{len(self.rows):,} completions of {self.labelled:,} problems have labels: {len(labels):,} steps, "
            f"{sum(labels) / max(1, len(labels)):.1%} right",
        ] + (["{agree:.1%} of {steps:,} steps are as in {file}".format(**self.compared)] if self.compared else [])


Labeller = Callable[[Record, SamplePool, str], list[tuple[int, float]] | None]
"""(sample, its pool, text put before its completion) -> (one past the last character in both together, label) of each
step; None where that is unknown."""


def label_steps(
    pools: Sequence[SamplePool], filters: SampleFilters, labeller: Labeller, separators: Sequence[str], begin: str = ""
) -> StepSelection:
    """Labels the steps of samples that ended by themselves and pass the conditions of the filters.

    The `labeller`'s steps must be those that the `separators` define. `begin` is put before every completion. A
    completion of a problem is used once, and `filters.per_problem` limits their number.

    Raises:
        InputError: A pool cannot be used, the labeller does not know its task, or no sample can be labelled; gives the
            counts.
    """
    selection = StepSelection()
    check_terms(pools, filters)
    seen: dict[bytes, set[bytes]] = {}
    for number, pool in enumerate(pools):
        for offset, record in records_of(pool):
            selection.samples += 1
            used = seen.setdefault(problem_of(record, pool), set())
            completion = noted(number, offset, record).completion
            row = None
            why = filters.why_not(record, filters.conditions)
            if why is None and completion in used:
                why = "are there already"
            elif why is None and filters.per_problem is not None and len(used) >= filters.per_problem:
                why = f"are more than {filters.per_problem} of a problem"
            if why is None:
                row = _labelled(record, pool, labeller, separators, begin)
                why = "have steps without a label, or others than the separators divide" if row is None else None
            if row is None:
                selection.left_out[str(why)] += 1
                continue
            # Only labelled completions are noted, as `per_problem` limits rows, not attempts.
            used.add(completion)
            selection.rows.append(row)
    selection.problems, selection.labelled = len(seen), sum(map(bool, seen.values()))
    if not selection.rows:
        counts = "\n".join(selection.lines()[:-1])
        raise InputError("the pools", "no sample has labels", f"generate more, or loosen the filters:\n{counts}")
    return selection


def compare(rows: Iterable[Mapping[str, Any]], file: Path) -> dict[str, Any]:
    """How often labels agree with others of the same steps: {"file", "steps": number in both, "agree": share of these}.

    A step is right from a label of 0.5 on. The last step of each is left out: after it there is only the success.

    Args:
        rows: Rows of `label_steps`.
        file: Rows of the same form, with the labels of people or of a verifier.

    Raises:
        InputError: A line of the file has no labelled steps, or no completion is in both.
    """
    others: dict[str, list[float]] = {}
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            others[_key(row)] = [float(label) for label in row["labels"]]
            if len(row["labels"]) != len(row["steps"]):
                raise ValueError(f"{len(row['labels'])} labels of {len(row['steps'])} steps")
        except (ValueError, TypeError, KeyError) as error:
            what = f"not a row with prompt, completion, steps and labels: {error}"
            raise InputError(f"{file}:{number}", what, "write such rows, as this command does") from error
    same = [
        (label >= 0.5) == (other >= 0.5)
        for row in rows
        if (key := _key(row)) in others
        for label, other in zip(row["labels"][:-1], others[key][:-1], strict=True)
    ]
    if not same:
        what = "has no completion of several steps that is labelled here"
        raise InputError(str(file), what, "give labels of the same pool")
    return {"file": str(file), "steps": len(same), "agree": sum(same) / len(same)}


def _key(row: Mapping[str, Any]) -> str:
    """Key of a completion with its steps, equal for equal ones."""
    return json.dumps([row[name] for name in ("prompt", "completion", "steps")], sort_keys=True)


def verified(record: Record, pool: SamplePool, begin: str) -> list[tuple[int, float]] | None:
    """`Labeller` of worked chain sums: the verifier (`reward/steps.py`) labels the steps; the label of the answer after
    them is the sample's success.

    Raises:
        InputError: The problem is not a chain sum.
    """
    text, success = begin + record["completion"], success_of(record, pool)
    prompt = Prompt(record["problem"], (), record["prompt"], record["answer"], record["task"])
    sample = Sample(prompt, record["index"], array("i"), array("f"), record["finish_reason"], ((0, 0),), text)
    try:
        labels = list(sum_steps(sample, NoOptions()).steps)
    except InputError as error:
        where = f"{pool.folder}, problem {record['problem']!r}"
        what = f"--steps without --continued is for chain sums: {error.where} {error.what}"
        raise InputError(where, what, "give --continued, or a pool of chain sums") from error
    if success is None or not labels:
        return None
    # What follows the worked steps is the answer, which is right when the sample is.
    if text[labels[-1][0] :].strip():
        labels.append((len(text), min(1.0, max(0.0, success))))
    return labels


def by_continuations(continued: Mapping[str, Continued], hard: bool) -> Labeller:
    """`Labeller` by continuations, given for each pool by its checksum; soft estimation unless `hard`."""

    def labeller(record: Record, pool: SamplePool, begin: str) -> list[tuple[int, float]] | None:
        success = success_of(record, pool)
        labels = None if success is None else continued[pool.sha256].labelled(record, success, hard)
        return labels and [(len(begin) + end, label) for end, label in labels]

    return labeller


def success_of(record: Record, pool: SamplePool) -> float | None:
    """Value of the term reported as accuracy; None if the task of the sample does not have it."""
    return record["terms"].get(pool.settings["reward"]["success"])


def _labelled(
    record: Record, pool: SamplePool, labeller: Labeller, separators: Sequence[str], begin: str
) -> dict[str, Any] | None:
    """Row of a sample; None when the labeller has other steps than the separators, or does not know them."""
    text, labels = begin + record["completion"], labeller(record, pool, begin)
    ends = [end for end, _ in labels or ()]
    # In reinforcement learning the separators alone divide completions, so labels of other steps would be of no use.
    if labels is None or ends != step_ends(text, separators):
        return None
    # Rows have steps without the separator before them. The longest first, as `step_ends` matches them: with "\n" and
    # "\n\n" the shorter one would leave a line end.
    longest_first = sorted(separators, key=len, reverse=True)
    steps = []
    for start, end in zip([0, *ends], ends, strict=False):
        before = next((each for each in longest_first if text.startswith(each, start, end)), "")
        steps.append(text[start:end].removeprefix(before))
    return {
        "prompt": record["asked"],
        "completion": text,
        "steps": steps,
        "labels": [label for _, label in labels],
        "problem": record["problem"],
        "task": record["task"],
        "pool": str(pool.folder),
        "index": record["index"],
        "reward": record["reward"],
    }
