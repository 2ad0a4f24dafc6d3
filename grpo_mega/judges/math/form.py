"""The structure of an answer: numbers with units, lists, tuples, intervals, matrices, equations, words.

`parse.py` reads these forms out of text, `verify.py` compares them. The simplest ones are read here: exact rational
numbers, and text that is an expression or words.
"""

from __future__ import annotations

import re
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
    """One value written in several ways, `2^{10} = 1024`: it equals what all of them equal. The last one is stated."""

    items: tuple[Form, ...]


@dataclass(frozen=True)
class Rounded:
    r"""An exact value with its approximation beside it: `2\sqrt{3} \approx 3.46`."""

    exact: Form
    decimal: Number
    places: int


Form = Same | Rounded | Number | Expression | Words | Numeral | Ordered | Unordered | Named | Relation


_FUNCTIONS = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp max min gcd lcm"
_GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau phi varphi chi "
    "psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
)
_COMMANDS = frozenset(f"frac sqrt binom cdot pi circ infty lfloor rfloor lceil rceil {_FUNCTIONS} {_GREEK}".split())
_ALLOWED = re.compile(r"[-A-Za-z0-9+*/^_(){}\[\]|!. \\]+")
# Longer runs of letters are words, not products: sympy would multiply the letters of `red` and find it equal to `der`.
_PRODUCT_OF_LETTERS = re.compile(r"[a-z]{1,2}|[abckmnpqrstxyz]{3}|[A-Z]")
_SHORT_WORDS = re.compile("no|on|in|at|up|it|is|an|as|be|so|he|we|me|my|us|am|pm")
# Notation with more than one reading (`2 3`, `3!!`, `x2`, `1 -- 2`, a sign at the end) stays words: a guess could
# reward a wrong answer.
_CONFUSED = re.compile(r"\d \d|\s!|!!|[A-Za-z]\d|\.\.|(?<!\d)\.(?!\d)|\\[^A-Za-z]|\|\||[-+*/] ?[+*/]|[-+] ?-|[-+*/^_]$")


def expression_or_words(text: str) -> Form:
    """Parses a text as an expression if it is written wholly in known notation, else as words."""
    # An index may be a word, as in `v_{max}`: only letters outside commands and indices must look like variables.
    bare = re.sub(r"\\([A-Za-z]+)", " ", text)
    commands = re.findall(r"\\([A-Za-z]+)", text)
    known = _ALLOWED.fullmatch(text) and all(command in _COMMANDS for command in commands)
    runs = re.findall(r"[A-Za-z]+", re.sub(r"_\{[A-Za-z0-9]*\}", " ", bare))
    letters = all(_PRODUCT_OF_LETTERS.fullmatch(run) for run in runs)
    word = re.fullmatch(r"[A-Za-z]", text) or _SHORT_WORDS.fullmatch(text)
    if not known or not letters or word or _CONFUSED.search(re.sub(r"_\{[^{}]*\}", " ", text)):
        return Words(plain_words(text))
    return Expression(text)


def plain_words(text: str) -> str:
    """The text reduced to its words: without text commands, articles and quotes, and in lower case except for names."""
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).strip(' "')
    if not re.fullmatch(r"[A-Za-z][-A-Za-z0-9 .']*", text):
        return re.sub(r"\s", "", text)
    text = re.sub(r"^(?:option|choice) (?=\(?[A-Z]\)?$)", "", " ".join(text.split()), flags=re.IGNORECASE)
    # `March 14th` is `March 14`.
    text = re.sub(r"(?<=[0-9])(?:st|nd|rd|th)(?![a-z])", "", text)
    text = re.sub(r"^(?:the|an?) (?=[A-Za-z])", "", text, flags=re.IGNORECASE)
    # Case distinguishes names, such as point A and side a, but not words.
    name = re.fullmatch(r"[A-Z]+|[A-Za-z]", text) and text not in ("YES", "NO", "TRUE", "FALSE")
    return text if name else text.lower()


MAX_EXPONENT = 1000

_INTEGER = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.\d*)?|\.\d+)"
_SIGNED = rf"(?:[-+]? ?{_DECIMAL}|\([-+]? ?{_DECIMAL}\))"
_NUMBERS = [
    re.compile(pattern, re.ASCII)
    for pattern in (
        # 1,234.5 and 2e-3.
        rf"(?P<decimal>{_DECIMAL})(?:[eE](?P<e>[-+]?\d+))?",
        # 3.5 \cdot 10^{4} and 10^{4}.
        rf"(?:(?P<decimal>{_DECIMAL}) ?(?:\\cdot|x) ?)?10\^\{{(?P<e>[-+]?\d+)\}}",
        # The mixed number 2 \frac{1}{3}, and below 2 1/3, where the space must not be missing: 21/3 is a fraction.
        rf"(?P<whole>{_INTEGER}) ?\\frac\{{ ?(?P<part>\d+) ?\}}\{{ ?(?P<of>\d+) ?\}}",
        r"(?P<whole>\d+) (?P<part>\d+)/(?P<of>\d+)",
        # \frac{1}{3} and 1/3, with a sign on either part.
        rf"\\frac\{{ ?(?P<top>{_SIGNED}) ?\}}\{{ ?(?P<bottom>{_SIGNED}) ?\}}",
        rf"(?P<top>{_SIGNED}) ?/ ?(?P<bottom>{_SIGNED})",
        # 0.1\overline{6}, which is 1/6.
        r"(?P<before>\d*\.\d*)\\overline\{(?P<repeated>\d+)\}",
    )
]


def rational(text: str) -> Fraction | None:
    r"""Exact value of a number literal; None for anything that would have to be computed.

    Accepts decimals, with thousands separators and exponents (`1,234.5`, `70 000`, `3.5 \cdot 10^{4}`), fractions,
    mixed numbers whose fraction is proper, and repeating decimals; one sign at most.
    """
    sign, text = re.fullmatch(r"([-+]?) ?(.*)", text.strip(), re.DOTALL).groups()  # type: ignore[union-attr]
    for pattern in _NUMBERS:
        if match := pattern.fullmatch(text):
            value = _value(match.groupdict())
            return -value if value is not None and sign == "-" else value
    return None


def _value(part: dict[str, str | None]) -> Fraction | None:
    """Value of the named parts of a number; None for a division by zero and for exponents beyond MAX_EXPONENT."""
    if part.get("top"):
        top, bottom = _plain_decimal(part["top"]), _plain_decimal(part["bottom"])
        return top / bottom if bottom else None
    if part.get("whole"):
        # A whole number before an improper fraction is rather a product, so it is not read as a number.
        whole, top, bottom = (_plain_decimal(part[name]) for name in ("whole", "part", "of"))
        return whole + top / bottom if 0 < top < bottom else None
    if part.get("repeated"):
        before, repeated = str(part["before"]), str(part["repeated"])
        decimals = len(before.partition(".")[2])
        # n digits that repeat forever are these digits divided by n nines, shifted behind the decimals before them.
        cycle = Fraction(int(repeated), (10 ** len(repeated) - 1) * 10**decimals)
        # `before` may be a bare point, which Fraction refuses; the zeros around it change no value.
        return Fraction(f"0{before}0") + cycle
    exponent = part.get("e") or "0"
    if len(exponent) > 6 or abs(int(exponent)) > MAX_EXPONENT:
        return None
    return _plain_decimal(part["decimal"] or "1") * Fraction(10) ** int(exponent)


def _plain_decimal(text: str | None) -> Fraction:
    """Value of a decimal with separators or parentheses."""
    return Fraction(re.sub(r"[,\s()]", "", str(text)))
