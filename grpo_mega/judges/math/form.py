"""The structure of an answer: numbers with units, lists, tuples, intervals, matrices, equations, words.

`parse.py` reads these forms out of text, `verify.py` compares them.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Number:
    """An exact rational number with its unit ("" for none)."""

    value: Fraction
    unit: str = ""


@dataclass(frozen=True)
class Expression:
    """LaTeX of one expression without relations or commas, for symbolic comparison, with its unit."""

    latex: str
    unit: str = ""


@dataclass(frozen=True)
class Words:
    """Text, single letters and unknown notation: equal to the same text only."""

    text: str


@dataclass(frozen=True)
class Numeral:
    """Digits in a base, as written: `1011_2`."""

    digits: str
    base: str


@dataclass(frozen=True)
class Ordered:
    """Entries whose order matters. `kind` tells points and intervals by brackets, ratios by `:`, matrices by size."""

    kind: str
    items: tuple[Form, ...]
    unit: str = ""


@dataclass(frozen=True)
class Unordered:
    """Several solutions, a set, or a union of intervals."""

    items: tuple[Form, ...]


@dataclass(frozen=True)
class Named:
    """`name = value`; for an interval, an inequality or membership of that name."""

    name: str
    value: Form


@dataclass(frozen=True)
class Relation:
    r"""`left operator right` with `=`, `<` or `\le`, not solved for a name."""

    left: str
    operator: str
    right: str


@dataclass(frozen=True)
class Same:
    """One value in several ways, `2^{10} = 1024`: it equals what all of them equal. The last is the one stated."""

    items: tuple[Form, ...]


@dataclass(frozen=True)
class Rounded:
    r"""An exact value with its approximation beside it: `2\sqrt{3} \approx 3.46`."""

    exact: Form
    decimal: Number
    places: int


Form = Same | Rounded | Number | Expression | Words | Numeral | Ordered | Unordered | Named | Relation
