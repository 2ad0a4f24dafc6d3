"""Texts that share runs of words: test problems in training problems, and near-duplicates among problems.

`Grams` finds test problems, or long pieces of them, in training problems. As in GPT-3 (arXiv 2005.14165, appendix C):
two texts that share a run of n words, 13 by default, are taken to have the same source. Texts are lower-cased and
punctuation is dropped; unlike there, mathematical signs are words, as 3+5 and 3-5 differ. Of scripts that write no
spaces, such as Chinese, Japanese and Thai, a character is half a word: most Chinese words have two, and 13 characters
are a stock phrase that many problems begin with. A test problem of fewer than n words is searched for as a whole; one
of fewer than 8 matches equal texts only, as such short runs are common.

`Near` finds problems that share most of their runs of `RUN` words with an earlier one. The similarity of two texts is
the Jaccard index of their sets of runs, |A & B| / |A | B|. Candidates come from MinHash signatures (Broder, 1997, "On
the resemblance and containment of documents"), of which two texts of similarity s share one value with probability s;
values are compared in bands, so that candidates share some band of `ROWS` values: with probability 1 - (1 -
s^ROWS)^BANDS, which is 0.99995 for s = 0.8 and 0.99 for 0.7. The similarity of candidates is then computed exactly.

Why not the library datasketch: its index keeps every text of a band, so problems that follow one template are all
compared with each other. With the same bands it found the same pairs in 10,000 unlike texts in 1.4 times the time, but
took 12 times as long for 4,000 texts of one template, and twice that with each doubling. It also needs scipy.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from grpo_mega.data.overlap import normalised
from grpo_mega.errors import InputError

UNSPACED = (
    # Thai, Lao, Burmese and Khmer.
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
    # Japanese and Chinese; the next line too.
    "\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
"""Characters of scripts that do not separate words, as ranges for a regular expression."""
_CHARACTER = re.compile(f"[{UNSPACED}]")
_WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+|[^\w\s.,;:!?'\"()\[\]{{}}$\\_`\u3001\u3002]")
"""Pattern of one word: a character of an unspaced script, a word, or a sign other than punctuation."""

SHORT = 8
"""Fewest words of a run to search for within a text; GPT-3's lower bound for n."""


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
        # Number of runs of each test problem.
        self._runs: list[int] = []
        # Run -> numbers of the test problems that contain it.
        self._tests: dict[tuple[str, ...], list[int]] = {}
        for name, text in problems:
            of_text = words(text)
            unique = {*long_runs(of_text, n)} or ({tuple(of_text)} if of_text else set())
            for gram in unique:
                self._tests.setdefault(gram, []).append(len(self._names))
            self._names.append(name)
            self._runs.append(len(unique))
        self._n = n
        # Problems that are shorter than a run and so are searched for as a whole.
        self._wholes = {run for run in self._tests if sum(map(halves, run)) < 2 * n}
        self._lengths = sorted({len(run) for run in self._wholes})

    def worst(self, text: str) -> Match | None:
        """Test problem with the largest fraction of its runs in the text; None if the text has none."""
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


RUN = 5
"""Words in a run, as in Lee et al., 2022 (arXiv 2107.06499), section 4.2; a shorter text is one run."""
BANDS, ROWS = 25, 5
LOWEST = 0.5
"""Lowest accepted similarity; below it candidates would be missed too often."""
MOST = 32
"""Number of texts kept in each band: otherwise thousands that follow one template would all be compared."""

# A fixed seed, so that a file is judged in the same way every time.
_noise = np.random.default_rng(0)
_FACTORS = _noise.integers(0, 1 << 63, BANDS * ROWS, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_TERMS = _noise.integers(0, 1 << 63, BANDS * ROWS, dtype=np.uint64)


class Near:
    """Index of texts for near-duplicate search. Memory: about 5 kB for each text, and 8 bytes for each run."""

    def __init__(self, least: float) -> None:
        """Creates an index for similarities of `least` (from `LOWEST` to 1) or more. Raises InputError for others."""
        if not LOWEST <= least <= 1:
            raise InputError(f"near={least:g}", "out of range", f"choose a value in [{LOWEST}, 1]")
        self._least = least
        self._names: list[str] = []
        self._runs: list[np.ndarray] = []
        self._bands: dict[bytes, list[int]] = {}

    def match(self, text: str) -> Match | None:
        """Most similar indexed text, the first of several; None when none is similar enough."""
        runs = _runs(text)
        near = {number for band in _bands(runs) for number in self._bands.get(band, ())}
        # Negative numbers: of several equally similar texts, max takes the first.
        likenesses = [(_likeness(runs, self._runs[number]), -number) for number in near]
        share, number = max(likenesses, default=(0.0, 0))
        return Match(self._names[-number], share) if share >= self._least else None

    def add(self, name: str, text: str) -> None:
        """Adds a text under a name."""
        runs = _runs(text)
        for band in _bands(runs):
            sharing = self._bands.setdefault(band, [])
            if len(sharing) < MOST:
                sharing.append(len(self._names))
        self._names.append(name)
        self._runs.append(runs)


def _runs(text: str) -> np.ndarray:
    """Hashes of the distinct runs of words, [runs] uint64."""
    of_text = words(text)
    runs = {*grams(of_text, min(RUN, len(of_text)))} if of_text else set()
    hashes = [hashlib.blake2b(" ".join(run).encode(errors="replace"), digest_size=8).digest() for run in runs]
    return np.unique(np.frombuffer(b"".join(hashes), dtype=np.uint64))


def _bands(runs: np.ndarray) -> Sequence[bytes]:
    """MinHash signature in bands, each prefixed with its number; empty for a text without words."""
    if not len(runs):
        return []
    # Odd factors make each map of the 2^64 hashes a permutation; uint64 wraps around, which is the modulus.
    signature = (runs[:, None] * _FACTORS + _TERMS).min(axis=0)
    return [bytes([number]) + band.tobytes() for number, band in enumerate(signature.reshape(BANDS, ROWS))]


def _likeness(one: np.ndarray, other: np.ndarray) -> float:
    """Jaccard index of two sets of runs; 0 when both are empty."""
    shared = len(np.intersect1d(one, other, assume_unique=True))
    return shared / max(len(one) + len(other) - shared, 1)
