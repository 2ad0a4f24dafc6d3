"""Decontamination: finds test problems, or long pieces of them, in training problems.

As in GPT-3 (arXiv 2005.14165, appendix C): two texts that share a run of n words, 13 by default, are taken to have the
same source. Texts are lower-cased and punctuation is dropped; unlike there, mathematical signs are words, as 3+5 and
3-5 differ. Of scripts that write no spaces, such as Chinese, Japanese and Thai, a character is half a word: most
Chinese words have two, and 13 characters are a stock phrase that many problems begin with. A test problem of fewer than
n words is searched for as a whole; one of fewer than 8 matches equal texts only, as such short runs are common.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from grpo_mega.data.overlap import normalised

UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
    "\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"  # Japanese and Chinese
    "\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
"""Characters of scripts that do not separate words, as ranges for a regular expression."""
_CHARACTER = re.compile(f"[{UNSPACED}]")
_WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+|[^\w\s.,;:!?'\"()\[\]{{}}$\\_`\u3001\u3002]")
"""Pattern of one word: a character of an unspaced script, a word, or a sign other than punctuation."""

SHORT = 8
"""Fewest words of a run that is searched for within a text; GPT-3's lower bound for n."""


def words(text: str) -> list[str]:
    """Normalised words of a text; in scripts that do not separate words, its characters."""
    return _WORD.findall(normalised(text).casefold())


def grams(sequence: list[str], n: int) -> Iterator[tuple[str, ...]]:
    """Yields every run of n words."""
    return (tuple(sequence[i : i + n]) for i in range(len(sequence) - n + 1))


def halves(word: str) -> int:
    """Length of a word in half words: 1 for a character of an unspaced script, else 2."""
    return 1 if _CHARACTER.match(word) else 2


def long_runs(sequence: list[str], n: int) -> Iterator[tuple[str, ...]]:
    """For each start, the shortest run of at least n words; none where too few words follow.

    Two texts have a piece of that length in common exactly when they have one of these runs in common.
    """
    lengths = [halves(word) for word in sequence]
    end = length = 0
    for start, first in enumerate(lengths):
        while length < 2 * n and end < len(sequence):
            length += lengths[end]
            end += 1
        if length < 2 * n:
            return
        yield tuple(sequence[start:end])
        length -= first


@dataclass(frozen=True)
class Match:
    """A training problem that shares words with a test problem.

    Attributes:
        test: The test problem's name.
        share: Fraction of the test problem's runs of words found in the training problem, in (0, 1].
    """

    test: str
    share: float


class Grams:
    """Index of the runs of words of test problems, to compare training problems with one at a time."""

    def __init__(self, problems: Iterable[tuple[str, str]], n: int) -> None:
        """Builds the index from (name, text) of the test problems; `n` is the length of a run in words."""
        self._names: list[str] = []
        self._runs: list[int] = []  # number of runs of each test problem
        self._tests: dict[tuple[str, ...], list[int]] = {}  # problems that have a run
        for name, text in problems:
            of_text = words(text)
            unique = {*long_runs(of_text, n)} or ({tuple(of_text)} if of_text else set())
            for gram in unique:
                self._tests.setdefault(gram, []).append(len(self._names))
            self._names.append(name)
            self._runs.append(len(unique))
        self._n = n
        self._wholes = {run for run in self._tests if sum(map(halves, run)) < 2 * n}  # problems shorter than a run
        self._lengths = sorted({len(run) for run in self._wholes})

    def worst(self, text: str) -> Match | None:
        """Test problem of which the text contains the largest fraction of runs; None if it contains none."""
        of_text = words(text)
        runs = {*long_runs(of_text, self._n)}
        for length in self._lengths:
            short = {*grams(of_text, length)} & self._wholes
            runs |= {run for run in short if length == len(of_text) or sum(map(halves, run)) >= 2 * SHORT}
        shared: Counter[int] = Counter()
        for run in runs:
            shared.update(self._tests.get(run, ()))
        if not shared:
            return None
        test, count = max(shared.items(), key=lambda item: (item[1] / self._runs[item[0]], -item[0]))
        return Match(self._names[test], count / self._runs[test])
