"""Weighted mixture of several sources, exact over any stretch, as a pure function of the counter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction


def shares(weights: Sequence[float]) -> list[Fraction]:
    """Each weight's share of their sum, as an exact fraction: 0.1 is a tenth."""
    exact = [Fraction(str(weight)) for weight in weights]
    return [weight / sum(exact) for weight in exact]


def mixture(parts: Sequence[Fraction]) -> Callable[[int], tuple[int, int]]:
    """k -> (source, number of earlier draws from it) of draw k, for positive shares that sum to 1.

    The first source has floor(k p) of the first k draws, which spreads its draws evenly (Bresenham's line); the others
    share the rest in the same way. So each source's share of the first k draws is off by fewer draws than there are
    sources, and its own draws are numbered 0, 1, 2, ...
    """
    left = [sum(parts[i:], Fraction(0)) for i in range(len(parts))]
    of_left = [part / rest for part, rest in zip(parts, left, strict=True)]

    def draw(k: int) -> tuple[int, int]:
        for source, part in enumerate(of_left):
            before = k * part.numerator // part.denominator
            if (k + 1) * part.numerator // part.denominator > before:
                return source, before
            k -= before
        raise AssertionError("the last source takes what is left")

    return draw
