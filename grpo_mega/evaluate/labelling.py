"""Labels of steps for a process reward model, of scored samples: a verifier's rewards of steps, and the success."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_mega.config.schema.terms import NoOptions
from grpo_mega.evaluate.results import Record
from grpo_mega.evaluate.selection import Filters, Pool, check_terms, noted, problem_of, records_of
from grpo_mega.reward.sums import sum_steps
from grpo_mega.step_ends import step_ends
from grpo_mega.types import Prompt, Sample

SUM_SEPARATORS = (";", "</think>")
"""What divides the steps of a worked chain sum, and these from the answer: `pairs.separators` for it."""


@dataclass
class StepSelection:
    """What was labelled, and what became of the other samples.

    Attributes:
        rows: The rows of `pairs.path` for a process reward model, each with where it is from.
        problems: Number of problems that were asked.
        labelled: Number of those with a row.
        samples: Number of all samples.
        left_out: {why, in words: number of samples}.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    problems: int = 0
    labelled: int = 0
    samples: int = 0
    left_out: Counter[str] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        """The numbers as lines for people."""
        labels = [label for row in self.rows for label in row["labels"]]
        return [
            f"{self.samples:,} samples of {self.problems:,} problems",
            *(f"  {number:,} {why}" for why, number in self.left_out.items()),
            f"{len(self.rows):,} answers of {self.labelled:,} problems have labels: {len(labels):,} steps, "
            f"{sum(labels) / max(1, len(labels)):.1%} of them right",
        ]


def label_steps(pools: Sequence[Pool], filters: Filters, separators: Sequence[str], begin: str = "") -> StepSelection:
    """Labels the steps of samples of chain sums that ended by themselves and pass the conditions of the filters.

    Of what the `separators` divide, the verifier of worked sums (`reward/sums.py`) says which steps are right; what
    follows them, the answer, is as right as the sample is successful. `begin` is put before every completion. No
    completion of a problem is there twice, and `filters.per_problem` limits them.

    Raises:
        ValueError: A pool cannot be chosen from, its task has no verifier of steps, or no sample can be labelled; says
            what became of them.
    """
    selection = StepSelection()
    check_terms(pools, filters)
    seen: dict[bytes, set[bytes]] = {}
    for number, pool in enumerate(pools):
        for offset, record in records_of(pool):
            selection.samples += 1
            own = seen.setdefault(problem_of(record), set())
            completion = noted(number, offset, record).completion
            row = None
            why = filters.why_not(record, filters.conditions) or _already(completion, own, filters.per_problem)
            if why is None:
                row = _labelled(record, pool, separators, begin)
                why = "have other steps than the separators divide, or no success" if row is None else None
            if row is None:
                selection.left_out[str(why)] += 1
                continue
            own.add(completion)
            selection.rows.append(row)
    selection.problems, selection.labelled = len(seen), sum(map(bool, seen.values()))
    if not selection.rows:
        raise ValueError("\n".join(["no sample has labels:", *selection.lines()[:-1]]))
    return selection


def _already(completion: bytes, own: set[bytes], most: int | None) -> str | None:
    if completion in own:
        return "are there already"
    return f"are more than {most} of a problem" if most is not None and len(own) >= most else None


def _labelled(record: Record, pool: Pool, separators: Sequence[str], begin: str) -> dict[str, Any] | None:
    """The row of a sample; None when the verifier has other steps, or when its success is unknown."""
    text, success = begin + record["completion"], record["terms"].get(pool.settings["reward"]["success"])
    prompt = Prompt(record["problem"], (), record["prompt"], record["answer"], record["task"])
    sample = Sample(prompt, record["index"], array("i"), array("f"), record["finish_reason"], ((0, 0),), text)
    try:
        judged = list(sum_steps(sample, NoOptions()).steps)
    except ValueError as error:
        raise ValueError(f"{pool.folder}, problem {record['problem']!r}: --steps is for chain sums: {error}") from error
    if success is None or not judged:
        return None
    if text[judged[-1][0] :].strip():
        judged.append((len(text), min(1.0, max(0.0, success))))
    ends, labels = [end for end, _ in judged], [label for _, label in judged]
    if ends != step_ends(text, separators):
        return None
    return {
        "prompt": record["asked"],
        "completion": text,
        "steps": [_without(text[start:end], separators) for start, end in zip([0, *ends], ends, strict=False)],
        "labels": labels,
        "problem": record["problem"],
        "task": record["task"],
        "pool": str(pool.folder),
        "index": record["index"],
        "reward": record["reward"],
    }


def _without(step: str, separators: Sequence[str]) -> str:
    """A step without the separator before it."""
    for each in sorted(separators, key=len, reverse=True):
        if step.startswith(each):
            return step.removeprefix(each)
    return step
