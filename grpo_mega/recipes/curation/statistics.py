"""Statistics of a file of problems: lengths, kinds of answers, duplicates, and overlap with a test set."""

from __future__ import annotations

import hashlib
import heapq
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from grpo_mega.config.schema import SourceConfig
from grpo_mega.data.overlap import normalised
from grpo_mega.data.problems import answer_of, asked_in, id_of, plain
from grpo_mega.data.records import Record
from grpo_mega.errors import InputError
from grpo_mega.recipes.curation.similar_texts import Grams, Match, Near

SHOWN = 10
"""Number of pairs of a training and a test problem, and of unusable rows, kept for display."""
KINDS = {
    "whole number": r"[-+]?\d[\d,]*",
    "decimal": r"[-+]?[\d,]*\.\d+",
    "fraction": r"[-+]?\d+ ?/ ?\d+",
    "letter": r"\(?[A-Z]\)?",
    "LaTeX": r".*[\\^_{}$].*",
    "one word": r"\S+",
}
"""Kind of answer -> pattern of the whole answer; the first match counts. Other answers are texts."""
Pair = tuple[float, str, str, str]
"""A row's overlap with another problem: (share, row, other problem, beginning of the row's problem)."""


@dataclass
class Statistics:
    """Counts over all rows of a file of problems.

    Attributes:
        rows: Number of rows.
        unusable: Rows that training would refuse.
        reasons: Reasons for the first unusable rows.
        characters, tokens: Lengths of the problems as they are stored, without a template.
        answers: {kind: number}.
        repeated: Rows whose problem equals that of an earlier row.
        near: Rows whose problem is a near-duplicate of that of an earlier row that was passed on, but not equal.
        near_pairs: (similarity, row, earlier row, beginning of the row's problem) of the most similar pairs.
        contaminated: Rows that share a run of words with a test problem.
        worst: (share, row, test problem, beginning of the row's problem) of the pairs that share most.
        written: Rows that were passed on.
    """

    rows: int = 0
    unusable: int = 0
    reasons: list[str] = field(default_factory=list)
    characters: array[int] = field(default_factory=lambda: array("q"))
    tokens: array[int] = field(default_factory=lambda: array("q"))
    answers: Counter[str] = field(default_factory=Counter)
    repeated: int = 0
    near: int = 0
    near_pairs: list[Pair] = field(default_factory=list)
    contaminated: int = 0
    worst: list[Pair] = field(default_factory=list)
    written: int = 0

    def as_json(self) -> dict[str, Any]:
        """The counts for JSON; for lengths the minimum, median, 99th percentile and maximum."""
        others = ("characters", "tokens", "worst", "near_pairs")
        record = {name: value for name, value in vars(self).items() if name not in others}
        lengths = {name: spread(values) for name in others[:2] if (values := getattr(self, name))}
        pairs = {"worst": ("share", "row", "test", "problem"), "near_pairs": ("likeness", "row", "earlier", "problem")}
        return (
            record
            | lengths
            | {name: [dict(zip(of, pair, strict=True)) for pair in getattr(self, name)] for name, of in pairs.items()}
        )


def spread(lengths: Iterable[int]) -> dict[str, int]:
    """Minimum, median, 99th percentile and maximum of some lengths."""
    ordered = sorted(lengths)
    at = {"min": 0, "median": len(ordered) // 2, "p99": len(ordered) * 99 // 100, "max": len(ordered) - 1}
    return {name: ordered[i] for name, i in at.items()}


def kind(answer: str) -> str:
    """Kind of an answer, a key of KINDS or text."""
    return next((name for name, pattern in KINDS.items() if re.fullmatch(pattern, answer.strip())), "text")


@dataclass(frozen=True)
class ProblemFilters:
    """Checks of every row, in addition to equal problems.

    Attributes:
        length: Function that counts the tokens of a text.
        tests: Runs of words of the test problems.
        near: Earlier rows for near-duplicate search; rows that are passed on are added.
        unique: Whether to leave out duplicates.
    """

    length: Callable[[str], int] | None = None
    tests: Grams | None = None
    near: Near | None = None
    unique: bool = False


def examined(
    tables: Iterable[Iterable[Record]], source: SourceConfig, statistics: Statistics, filters: ProblemFilters
) -> Iterator[Record]:
    """Counts rows one by one and yields the clean ones.

    Left out are rows that training would refuse, rows that share a run of words with a test problem and, with `unique`,
    duplicates of an earlier row and near-duplicates of a row that was passed on. Memory: about 200 bytes for each row,
    and that of `Near`.

    Args:
        tables: Rows of each file; ids must be unique within a file.
        source: Columns of the rows. Ids are checked if it names their column: a source of data.sources reads no other.
        statistics: Counters to update.
        filters: Checks to apply.
    """
    seen: set[bytes] = set()
    for rows in tables:
        ids: set[bytes] = set()
        for row in rows:
            statistics.rows += 1
            try:
                text, answer = plain(asked_in(row, source)), answer_of(row, source)
                # Checksums in place of the ids themselves keep the memory per row constant.
                if source.id:
                    row_id = id_of(row, source)
                    if (mark := _mark(row_id)) in ids:
                        where = f"{row.where}: field {source.id!r}"
                        raise InputError(where, f"{row_id!r} was already used", "make ids unique")
                    ids.add(mark)
            except InputError as error:
                statistics.unusable += 1
                statistics.reasons += [str(error)] if len(statistics.reasons) < SHOWN else []
                continue
            # Counted for all usable rows, also for those that are left out below: the numbers describe the file.
            statistics.characters.append(len(text))
            if filters.length:
                statistics.tokens.append(filters.length(text))
            statistics.answers[kind(answer)] += 1
            if _is_clean(row, text, seen, statistics, filters):
                statistics.written += 1
                yield row


def _is_clean(row: Record, text: str, seen: set[bytes], statistics: Statistics, filters: ProblemFilters) -> bool:
    """Whether a problem neither repeats another one nor overlaps with test problems; updates the counts."""
    mark = _mark(normalised(text))
    is_repeated, earlier = mark in seen, None
    seen.add(mark)
    statistics.repeated += is_repeated
    if filters.near and not is_repeated:
        earlier = filters.near.match(text)
    if earlier:
        statistics.near += 1
        statistics.near_pairs = _worst(statistics.near_pairs, earlier, row, text)
    match = filters.tests.worst(text) if filters.tests else None
    if match:
        statistics.contaminated += 1
        statistics.worst = _worst(statistics.worst, match, row, text)
    is_clean = not match and not (filters.unique and (is_repeated or earlier))
    # A row that is left out must not cause others to be left out.
    if filters.near and is_clean and not is_repeated:
        filters.near.add(row.where, text)
    return is_clean


def _mark(text: str) -> bytes:
    """Checksum of a text: 16 bytes in place of texts keep the memory at 200 bytes a row."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def _worst(pairs: list[Pair], match: Match, row: Record, text: str) -> list[Pair]:
    """The pairs with the largest overlap, largest first, including this one if it belongs to them."""
    pair = (match.share, row.where, match.test, " ".join(text.split())[:100])
    return heapq.nlargest(SHOWN, [*pairs, pair], key=lambda one: one[0])
