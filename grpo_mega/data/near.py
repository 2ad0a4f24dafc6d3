"""Near-duplicates: problems that share most of their runs of words with an earlier problem.

The similarity of two texts is the Jaccard index of their sets of runs of `RUN` words, |A & B| / |A | B|. Candidates
come from MinHash signatures (Broder, 1997, "On the resemblance and containment of documents"), of which two texts of
similarity s share one value with probability s; values are compared in bands, so that candidates share some band of
`ROWS` values: with probability 1 - (1 - s^ROWS)^BANDS, which is 0.99995 for s = 0.8 and 0.99 for 0.7. The similarity of
candidates is then computed exactly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from grpo_mega.data.contamination import Match, grams, words

RUN = 5
"""Words in a run, as in Lee et al., 2022 (arXiv 2107.06499), section 4.2; a shorter text is one run."""
BANDS, ROWS = 25, 5
LOWEST = 0.5
"""Lowest similarity that can be asked for; below it candidates would be missed too often."""
MOST = 32
"""Number of texts kept in each band: otherwise thousands that follow one template would all be compared."""

_noise = np.random.default_rng(0)
_FACTORS = _noise.integers(0, 1 << 63, BANDS * ROWS, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_TERMS = _noise.integers(0, 1 << 63, BANDS * ROWS, dtype=np.uint64)


class Near:
    """Index of texts for near-duplicate search. Memory: about 5 kB for each text, and 8 bytes for each run."""

    def __init__(self, least: float) -> None:
        """Creates an index for similarities of `least` (from `LOWEST` to 1) or more. Raises ValueError for others."""
        if not LOWEST <= least <= 1:
            raise ValueError(f"near={least:g}: choose a value in [{LOWEST}, 1]")
        self._least = least
        self._names: list[str] = []
        self._runs: list[np.ndarray] = []
        self._bands: dict[bytes, list[int]] = {}

    def match(self, text: str) -> Match | None:
        """Most similar indexed text, the first of several; None when none is similar enough."""
        runs = _runs(text)
        near = {number for band in _bands(runs) for number in self._bands.get(band, ())}
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
    signature = (runs[:, None] * _FACTORS + _TERMS).min(axis=0)  # modulo 2^64, as integers wrap around
    return [bytes([number]) + band.tobytes() for number, band in enumerate(signature.reshape(BANDS, ROWS))]


def _likeness(one: np.ndarray, other: np.ndarray) -> float:
    """Jaccard index of two sets of runs; 0 when both are empty."""
    shared = len(np.intersect1d(one, other, assume_unique=True))
    return shared / max(len(one) + len(other) - shared, 1)
