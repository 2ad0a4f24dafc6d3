"""Preference pairs for a reward model, from scored samples: a completion that passes is preferred to a wrong one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from grpo_mega.errors import InputError
from grpo_mega.evaluate.results import SAMPLES
from grpo_mega.recipes.curation.selection import (
    Passed,
    SampleFilters,
    SamplePool,
    check_terms,
    noted,
    ordered,
    problem_of,
    records_of,
)


@dataclass
class PairSelection:
    """Selected pairs, and counts of the other samples.

    Attributes:
        pairs: (chosen, rejected), problem after problem.
        problems: Number of problems.
        paired: Number of problems with a pair.
        samples: Number of all samples.
        left_out: {reason: number of samples}.
    """

    pairs: list[tuple[Passed, Passed]] = field(default_factory=list)
    problems: int = 0
    paired: int = 0
    samples: int = 0
    left_out: Counter[str] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        """Summary of the counts, as lines of text."""
        return [
            f"{self.samples:,} samples of {self.problems:,} problems",
            *(f"  {number:,} {why}" for why, number in self.left_out.items()),
            f"{len(self.pairs):,} pairs of {self.paired:,} problems are chosen",
        ]


def select_pairs(pools: Sequence[SamplePool], filters: SampleFilters) -> PairSelection:
    """Pairs samples of the same problem: one that passes the filters, and one whose success is below 1.

    Both ended by themselves. No completion of a problem is in two pairs, and `filters.per_problem` limits the pairs.

    Raises:
        InputError: A pool cannot be used, or there is no pair; gives the counts.
    """
    selection = PairSelection()
    good: dict[bytes, dict[bytes, Passed]] = {}
    bad: dict[bytes, dict[bytes, Passed]] = {}
    check_terms(pools, filters)
    for number, pool in enumerate(pools):
        conditions = cache(partial(pool.conditions, filters))
        for offset, record in records_of(pool):
            selection.samples += 1
            problem = problem_of(record, pool)
            side, wrong = good.setdefault(problem, {}), bad.setdefault(problem, {})
            note = noted(number, offset, record)
            if why := filters.why_not(record, conditions(record["task"])):
                success = record["terms"].get(pool.settings["reward"]["success"])
                # The wrong completion of a pair need not meet the conditions on terms, but must pass the other filters.
                if success is None or not (success < 1 and filters.why_not(record, ()) is None):
                    selection.left_out[why] += 1
                    continue
                side = wrong
            # `setdefault` returns an earlier sample if the same completion has been noted before.
            if side.setdefault(note.completion, note) is not note:
                selection.left_out["are there already"] += 1
    # Each completion is used in one pair at most, so a problem has as many pairs as the rarer of right and wrong ones.
    for problem in good:
        pairs = [*zip(ordered([*good[problem].values()], filters.choose), bad[problem].values(), strict=False)]
        chosen = pairs[: filters.per_problem]
        selection.pairs += chosen
        selection.paired += bool(chosen)
        selection.left_out["have no counterpart, or are more than asked for"] += (
            len(good[problem]) + len(bad[problem]) - 2 * len(chosen)
        )
    # Unary plus drops reasons that do not occur.
    selection.left_out = +selection.left_out
    selection.problems = len(good)
    if not selection.pairs:
        counts = "\n".join(selection.lines()[:-1])
        raise InputError("the pools", "no two samples make a pair", f"generate more for each problem:\n{counts}")
    return selection


def rows_of_pairs(pools: Sequence[SamplePool], selection: PairSelection, begin: str = "") -> Iterator[dict[str, Any]]:
    """Yields the pairs as rows of `pairs.path`, each with its origin; `begin` is put before the responses."""
    files = [(pool.folder / SAMPLES).open("rb") for pool in pools]
    try:
        for pair in selection.pairs:
            records = []
            for each in pair:
                files[each.pool].seek(each.offset)
                records.append(json.loads(files[each.pool].readline()))
            chosen, rejected = records
            yield {
                "prompt": chosen["asked"],
                "chosen": begin + chosen["completion"],
                "rejected": begin + rejected["completion"],
                "problem": chosen["problem"],
                "task": chosen["task"],
                "pools": [str(pools[each.pool].folder) for each in pair],
                "indices": [each.index for each in pair],
                "rewards": [record["reward"] for record in records],
            }
    finally:
        for file in files:
            file.close()
