"""The verifier against labelled pairs (`pairs.txt`, which states the conventions), beside math-verify alone.

A third of the pairs, drawn by a hash, is held out: whoever changes the verifier looks at the mistakes on the others
only, which is why only those are listed when a limit is missed.
"""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import math_verify
import pytest

from grpo_mega.judges.math.verify import equivalent

NAMED = (
    "named in reports of testers",
    "a value and its approximation, calculations, conditions",
    "options with their texts, and sentences that begin with yes or no",
)
"""Headings of pairs that must all be decided right, and are therefore not held out."""
BOMBS = "bombs: math-verify alone is not asked"
LEAST_PRECISION, LEAST_RECALL = 0.995, 0.97


@dataclass(frozen=True)
class Pair:
    """One line of the file."""

    style: str
    truth: str
    answer: str
    equal: bool

    @property
    def held_out(self) -> bool:
        return self.style not in NAMED and zlib.crc32(f"{self.truth} :: {self.answer}".encode()) % 3 == 0


@dataclass(frozen=True)
class Score:
    """What a verifier makes of some pairs."""

    precision: float
    recall: float
    accuracy: float


def read_pairs() -> list[Pair]:
    """All pairs of `pairs.txt`."""
    pairs, style = [], ""
    for line in Path(__file__).with_name("pairs.txt").read_text().splitlines():
        if line.startswith("["):
            style = line.strip("[]")
        elif line.startswith(("= ", "! ")):
            truth, separator, answer = line[2:].partition(" :: ")
            assert separator, f"no ` :: ` in {line!r}"
            pairs.append(Pair(style, truth, answer, line[0] == "="))
        else:
            assert not line or line.startswith("#"), f"neither pair nor comment: {line!r}"
    return pairs


def math_verify_alone(answer: str, truth: str) -> bool:
    """As its README calls it: parse, parse, verify, the answer in a box as a completion has it."""
    return math_verify.verify(math_verify.parse(f"${truth}$"), math_verify.parse(f"\\boxed{{{answer}}}"))


def score(verdicts: dict[Pair, bool], pairs: Iterable[Pair]) -> Score:
    """Precision, recall and accuracy on those pairs."""
    kinds = [(verdicts[pair], pair.equal) for pair in pairs]
    hits = kinds.count((True, True))
    return Score(
        hits / max(1, sum(verdict for verdict, _ in kinds)),
        hits / max(1, sum(equal for _, equal in kinds)),
        sum(verdict == equal for verdict, equal in kinds) / len(kinds),
    )


PAIRS = read_pairs()
PARTS = {
    "all": PAIRS,
    "seen": [pair for pair in PAIRS if not pair.held_out],
    "held out": [pair for pair in PAIRS if pair.held_out],
}


def judge(verifier: Callable[[str, str], bool], pairs: Iterable[Pair]) -> dict[Pair, bool]:
    """The verifier's verdict on every pair."""
    return {pair: pair.style != BOMBS and verifier(pair.answer, pair.truth) for pair in pairs}


@pytest.fixture(scope="module")
def verdicts() -> dict[Pair, bool]:
    return {pair: equivalent(pair.answer, pair.truth) for pair in PAIRS}


def test_the_set_is_large_diverse_and_hostile():
    texts = [(pair.truth, pair.answer) for pair in PAIRS]
    assert len(texts) == len(set(texts)) >= 500
    assert sum(not pair.equal for pair in PAIRS) >= 0.4 * len(PAIRS)
    assert 0.25 < len(PARTS["held out"]) / len(PAIRS) < 0.4


def test_what_testers_named_is_decided_right(verdicts: dict[Pair, bool]):
    wrong = [pair for pair in PAIRS if pair.style in NAMED and verdicts[pair] != pair.equal]
    assert not wrong


@pytest.mark.parametrize("part", PARTS)
def test_precision_and_recall(verdicts: dict[Pair, bool], part: str):
    found = score(verdicts, PARTS[part])
    wrong = [pair for pair in PARTS["seen"] if verdicts[pair] != pair.equal]
    assert found.precision >= LEAST_PRECISION, wrong
    assert found.recall >= LEAST_RECALL, wrong


def test_pairs_beside_math_verify(verdicts: dict[Pair, bool]):
    """Of one pair in twenty; the test below asks for all."""
    better_than_alone(verdicts, PAIRS[::20])


@pytest.mark.long
def test_table_beside_math_verify(verdicts: dict[Pair, bool], capsys: pytest.CaptureFixture[str]):
    """Prints the table of docs/rewards.md."""
    alone = better_than_alone(verdicts, PAIRS)
    with capsys.disabled():
        print("\n| part | pairs | verifier | precision | recall | accuracy |\n| --- | --- | --- | --- | --- | --- |")
        for part, pairs in PARTS.items():
            for name, each in (("grpo_mega", verdicts), ("math-verify alone", alone)):
                s = score(each, pairs)
                print(f"| {part} | {len(pairs)} | {name} | {s.precision:.3f} | {s.recall:.3f} | {s.accuracy:.3f} |")


def better_than_alone(verdicts: dict[Pair, bool], pairs: list[Pair]) -> dict[Pair, bool]:
    """Asserts that ours is better in all three numbers; the verdicts of math-verify alone."""
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    alone = judge(math_verify_alone, pairs)
    ours, theirs = score(verdicts, pairs), score(alone, pairs)
    assert ours.precision > theirs.precision
    assert ours.recall > theirs.recall
    assert ours.accuracy > theirs.accuracy
    return alone


def test_the_examples_of_the_documentation_hold():
    """docs/rewards.md: each row of its first table has a truth, what is accepted for it and what is refused."""
    text = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text()
    rows = [[re.findall(r"`([^`]*)`", cell) for cell in row.split(" | ")] for row in re.findall(r"(?m)^\| `.*", text)]
    assert len(rows) > 10
    for (truth,), accepted, refused in rows:
        assert [answer for answer in accepted if not equivalent(answer, truth)] == []
        assert [answer for answer in refused if equivalent(answer, truth)] == []
