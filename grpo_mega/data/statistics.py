"""What a file of problems holds: lengths, kinds of answers, repetitions, and what is in a test set too."""

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
from grpo_mega.data.contamination import Grams, Match
from grpo_mega.data.near import Near
from grpo_mega.data.overlap import normalised
from grpo_mega.data.problems import answer_of, asked_in, own_id, plain
from grpo_mega.data.records import Record

SHOWN = 10
"""Pairs of a training and a test problem, and unusable rows, that are kept to be shown."""
KINDS = {
    "whole number": r"[-+]?\d[\d,]*",
    "decimal": r"[-+]?[\d,]*\.\d+",
    "fraction": r"[-+]?\d+ ?/ ?\d+",
    "letter": r"\(?[A-Z]\)?",
    "LaTeX": r".*[\\^_{}$].*",
    "one word": r"\S+",
}
"""Kind of an answer -> the pattern of the whole of it; the first that fits. Others are texts."""
Pair = tuple[float, str, str, str]
"""What a row has in common with another problem: how much, the row, the other, and the beginning of the row's."""


@dataclass
class Statistics:
    """Counts over all rows.

    Attributes:
        rows: Number of rows.
        unusable: Rows that training would refuse.
        reasons: Why, of the first of them.
        characters, tokens: Lengths of the problems as they are stored, without a template.
        answers: {kind: number}.
        repeated: Rows whose problem an earlier row has, in the same words.
        near: Rows whose problem is most of that of an earlier row that was passed on, and the other way round, in
            other words than the same.
        near_pairs: (likeness, row, earlier row, beginning of the row's problem) of those that are nearest.
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
        """The counts as JSON has them, of lengths the least, the median, the 99th percentile and the greatest."""
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
    """Least, median, 99th percentile and greatest of some lengths."""
    ordered = sorted(lengths)
    at = {"min": 0, "median": len(ordered) // 2, "p99": len(ordered) * 99 // 100, "max": len(ordered) - 1}
    return {name: ordered[i] for name, i in at.items()}


def kind(answer: str) -> str:
    """Which of KINDS an answer is."""
    return next((name for name, pattern in KINDS.items() if re.fullmatch(pattern, answer.strip())), "text")


@dataclass(frozen=True)
class Filters:
    """What is looked for in every row, besides equal problems.

    Attributes:
        length: A text's number of tokens.
        tests: The test problems' runs of words.
        near: The earlier rows that later ones may be near to; those that are passed on are added.
        unique: Whether to leave out what is there already.
    """

    length: Callable[[str], int] | None = None
    tests: Grams | None = None
    near: Near | None = None
    unique: bool = False


def examined(
    tables: Iterable[Iterable[Record]], source: SourceConfig, statistics: Statistics, filters: Filters
) -> Iterator[Record]:
    """Counts rows one by one and passes those on that are clean.

    A row is left out that training would refuse, that shares a run of words with a test problem, or with `unique`
    whose problem an earlier row has, in the same words, or one that was passed on in nearly the same. Memory: about
    200 bytes for each row, and what `Near` needs.

    Args:
        tables: The rows of each file, whose ids are to differ.
        source: Their columns. Ids are checked when it names their column: a source of data.sources reads no other.
        statistics: Where they are counted.
        filters: What is looked for.
    """
    seen: set[bytes] = set()
    for rows in tables:
        ids: set[bytes] = set()
        for row in rows:
            statistics.rows += 1
            try:
                text, answer = plain(asked_in(row, source)), answer_of(row, source)
                if source.id:
                    _check_new(own_id(row, source), ids, row, source)
            except ValueError as error:
                statistics.unusable += 1
                statistics.reasons += [str(error)] if len(statistics.reasons) < SHOWN else []
                continue
            statistics.characters.append(len(text))
            if filters.length:
                statistics.tokens.append(filters.length(text))
            statistics.answers[kind(answer)] += 1
            if _is_clean(row, text, seen, statistics, filters):
                statistics.written += 1
                yield row


def _check_new(own: str, ids: set[bytes], row: Record, source: SourceConfig) -> None:
    """Adds an id to those of the file. Raises ValueError when it is one of them."""
    mark = _mark(own)
    if mark in ids:
        raise ValueError(f"{row.where}: field {source.id!r}: {own!r} was already used; ids must be unique")
    ids.add(mark)


def _is_clean(row: Record, text: str, seen: set[bytes], statistics: Statistics, filters: Filters) -> bool:
    """Compares a problem with earlier ones and with the test problems, and counts what it is equal or near to."""
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
    if filters.near and is_clean and not is_repeated:  # a row that is left out must not make others be left out
        filters.near.add(row.where, text)
    return is_clean


def _mark(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def _worst(pairs: list[Pair], match: Match, row: Record, text: str) -> list[Pair]:
    """The pairs that share most, the worst first, this one among them if it is one."""
    pair = (match.share, row.where, match.test, " ".join(text.split())[:100])
    return heapq.nlargest(SHOWN, [*pairs, pair], key=lambda one: one[0])
