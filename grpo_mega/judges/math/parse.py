r"""Parses the text of an answer into a `Form`: lists of solutions, relations, brackets, matrices.

`parse` never evaluates anything. Unrecognised text becomes `Words`, which equal only the same words: unknown notation
may cost a right answer its reward, but never rewards a wrong one. Single values are parsed in `quantity.py`.
"""

from __future__ import annotations

import functools
import re
from fractions import Fraction
from itertools import pairwise
from math import inf

from grpo_mega.judges.math.form import (
    Expression,
    Form,
    Named,
    Number,
    Ordered,
    Relation,
    Rounded,
    Same,
    Unordered,
    Words,
    expression_or_words,
    plain_words,
    rational,
)
from grpo_mega.judges.math.normalize import closing, normalize
from grpo_mega.judges.math.quantity import quantity


# Cached because every completion of a group is compared with the same truth, and many give the same answer.
@functools.lru_cache(maxsize=4096)
def parse(text: str) -> Form:
    """Form of any answer. Callers bound length and nesting first."""
    return _solutions(normalize(text))


# -- lists ------------------------------------------------------------------------------------------------------------

# The number comes first in `_SEPARATORS`, so that the commas of `1,234,567` are part of a match and separate nothing.
_THOUSANDS = r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])"
_SEPARATORS = re.compile(
    rf"(?P<number>{_THOUSANDS})|(?P<cut>,? *(?<![\\A-Za-z])(?:and|or)(?![A-Za-z])|\\cup(?![A-Za-z])|[,;])|[(){{}}\[\]]"
)
_COMMAS = re.compile(r"(?P<cut>[,;])|[(){}\[\]]")


def _split(text: str, pattern: re.Pattern[str]) -> list[str]:
    """Parts of the text between matches of the pattern's group `cut` outside all brackets."""
    parts, start, depth = [], 0, 0
    for match in pattern.finditer(text):
        bracket = match.group()
        if match["cut"] is None:
            depth += (bracket in "([{") - (bracket in ")]}")
        elif depth == 0:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    return [*parts, text[start:].strip()]


def _solutions(text: str) -> Form:
    r"""Form of the whole answer: one value, or several joined by commas, `and`, `or`, `\cup`, or split at `\pm`."""
    # `|A \cup B| = 6` becomes `n(A \cup B) = 6`, as brackets protect the `\cup` from being read as a separator.
    text = re.sub(r"\|([^|]*)\|(?= ?=)", r"n(\1)", _bare(text))
    # The name of an integer parameter does not matter: `n\pi, n \in \mathbb{Z}` is `k\pi`.
    if (match := _INTEGER_PARAMETER.search(text)) and match.start():
        text = re.sub(rf"(?<![A-Za-z\\]){match[1]}(?![A-Za-z])", "k", text[: match.start()])
    parts = [sign for part in _split(text, _SEPARATORS) for sign in _signs(part)]
    items = tuple(_item(part) for part in parts)
    if len(items) == 1:
        return items[0]
    items = _without_dots(items)
    if len(names := {item.name for item in items if isinstance(item, Named)}) == 1 and (both := _both(text, items)):
        return Named(names.pop(), both)
    # Intervals of one unknown that are joined by `and` do not form a union; commas and `or` do.
    unknowns = {item.name if isinstance(item, Named) and isinstance(item.value, Ordered) else None for item in items}
    if _and(text) and len(unknowns) == 1 and None not in unknowns:
        return Words(plain_words(text))
    return Unordered(items)


_INTEGER_PARAMETER = re.compile(r"[,;(]? ?(?:\\text\{ ?(?:where|for) ?\} ?)?([a-z]) ?\\in ?\\mathbb\{Z\} ?\)?$")


def _both(text: str, items: tuple[Form, ...]) -> Form | None:
    r"""Numbers that meet several conditions, `x > 0 and x \ne 1`; None for other lists and bounds."""
    if len(items) < 2 or not (_and(text) or r"\ne" in text) or re.search(r"(?<![\\A-Za-z])or(?![A-Za-z])", text):
        return None
    # Each condition may be a union, such as `x \ne 1`. Intersecting unions multiplies the number of intervals, hence
    # the bound below.
    common: list[Form | None] = [_ALL_REALS]
    for item in items:
        pieces = item.items if isinstance(item, Unordered) else (item,)
        values = [piece.value if isinstance(piece, Named) else piece for piece in pieces]
        common = [both for one in common for other in values for both in _overlap(one, other)]
        if None in common or len(common) > MOST_INTERVALS:
            return None
    intervals = tuple(form for form in common if form is not None)
    if not intervals:
        return None
    return intervals[0] if len(intervals) == 1 else Unordered(intervals)


MOST_INTERVALS = 16
"""Largest number of intervals that conditions may leave."""


def _overlap(one: Form | None, other: Form) -> list[Form | None]:
    """Intersection of two intervals of numbers: [] if it is empty, [None] if one of them is not such an interval."""
    ours, theirs = _ends(one), _ends(other)
    if ours is None or theirs is None:
        return [None]
    (low, high), (other_low, other_high) = ours, theirs
    # Pairs compare by bound first, then by exclusion, whose sign makes the excluded one of two equal bounds the
    # tighter.
    (left, opened), (right, closed) = max(low, other_low), min(high, other_high)
    if left > right or (left == right and (opened, closed) != (0, 0)):
        return []
    kind = ("(" if opened else "[") + (")" if closed else "]")
    bounds = [
        Number(Fraction(bound)) if abs(bound) != inf else Words(r"\infty" if bound > 0 else r"-\infty")
        for bound in (left, right)
    ]
    return [Ordered(kind, tuple(bounds))]


def _ends(form: Form | None) -> tuple[tuple[float | Fraction, int], tuple[float | Fraction, int]] | None:
    """((lowest, 1 if it is excluded), (highest, -1 if it is excluded)) of an interval; None for other forms."""
    if not isinstance(form, Ordered) or len(form.items) != 2 or form.kind not in ("()", "[]", "(]", "[)"):
        return None
    bounds = [
        item.value if isinstance(item, Number) else {r"-\infty": -inf, r"\infty": inf}.get(getattr(item, "text", ""))
        for item in form.items
    ]
    if None in bounds:
        return None
    return (bounds[0], int(form.kind[0] == "(")), (bounds[1], -int(form.kind[1] == ")"))  # type: ignore[return-value]


def _and(text: str) -> bool:
    return re.search(r"(?<![\\A-Za-z])and(?![A-Za-z])", text) is not None


def _signs(text: str) -> list[str]:
    r"""Both readings of a text with `\pm`, or the text alone; in a set, each member is expanded separately."""
    if text.startswith(r"\{") or not re.search(r"\\(?:pm|mp)(?![A-Za-z])", text):
        return [text]
    upper = re.sub(r"\\mp(?![A-Za-z])", "-", re.sub(r"\\pm(?![A-Za-z])", "+", text))
    lower = re.sub(r"\\mp(?![A-Za-z])", "+", re.sub(r"\\pm(?![A-Za-z])", "-", text))
    return [re.sub(r"(^|[=(,{])\s*\+", r"\1", reading) for reading in (upper, lower)]


def _bare(text: str) -> str:
    r"""The text without braces or `\text{}` around it."""
    while text.startswith("{") and closing(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    match = re.fullmatch(r"\\text\{([^{}]*)\}", text)
    return match[1].strip() if match else text


# -- one value --------------------------------------------------------------------------------------------------------


def _item(text: str) -> Form:
    """Form of one member of a list, from the first parser that recognises it."""
    text = _bare(text)
    # Relations come before brackets, as `\{x \mid x > 2\}` is a condition and not a set of one member.
    for read in (_known_words, _relation, _matrix, _bracketed, quantity):
        form = read(text)
        if form is not None:
            return form
    return expression_or_words(text)


_UP_TO_TWENTY = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_ALL_REALS = Ordered("()", (Words(r"-\infty"), Words(r"\infty")))
_KNOWN_WORDS: dict[str, Form] = {
    r"\mathbb{R}": _ALL_REALS,
    "all real numbers": _ALL_REALS,
    "all reals": _ALL_REALS,
    r"\infty": Words(r"\infty"),
    r"+\infty": Words(r"\infty"),
    r"-\infty": Words(r"-\infty"),
    "real numbers": _ALL_REALS,
    r"\{\}": Words(r"\emptyset"),
    **dict.fromkeys(["no solution", "no solutions", "no real solution", "no real solutions"], Words(r"\emptyset")),
    **dict.fromkeys(["empty set", "the empty set"], Words(r"\emptyset")),
    **dict.fromkeys(["does not exist", "dne", "undefined"], Words("does not exist")),
    **{word: Number(Fraction(value)) for value, word in enumerate(_UP_TO_TWENTY.split())},
    **{word: Number(Fraction(10 * value)) for value, word in enumerate(_TENS.split(), 2)},
    **{
        f"{ten}-{one}": Number(Fraction(10 * value + unit))
        for value, ten in enumerate(_TENS.split(), 2)
        for unit, one in enumerate(_UP_TO_TWENTY.split()[1:10], 1)
    },
}


def _known_words(text: str) -> Form | None:
    """Form of words and signs with a fixed meaning, and of the real numbers without one point; None for other text."""
    text = text.replace("{ ", "{").replace(" }", "}")
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text).strip()
    if match := _ALL_BUT.fullmatch(text):
        return _all_but(_solutions_inside(re.sub(r"^[a-z] ?(?:=|\\ne) ?", "", match[1])))
    text = re.sub(r"(\\infty) $", r"\1", text)
    return _KNOWN_WORDS.get(text) or _KNOWN_WORDS.get(text.replace(" ", "")) or _KNOWN_WORDS.get(text.lower())


_ALL_BUT = re.compile(
    r"(?:\\mathbb\{R\} ?(?:\\setminus|-) ?\\\{|(?:[a-z] ?\\in ?)?(?:\\mathbb\{R\}|all real numbers|all reals) ?"
    r"(?:except|but|other than|, ?(?=[a-z] ?\\ne))(?: for)?) ?(.*?)(?:\\\})?"
)


def _all_but(points: tuple[Form, ...]) -> Unordered:
    """The real numbers without these points, in ascending order where they are numbers."""
    if all(isinstance(point, Number) for point in points):
        points = tuple(sorted(points, key=lambda point: point.value if isinstance(point, Number) else 0))
    ends = (Words(r"-\infty"), *points, Words(r"\infty"))
    return Unordered(tuple(Ordered("()", pair) for pair in pairwise(ends)))


_OPERATOR = re.compile(r"(?P<cut>=|<|>|\\(?:le|ge|ne|in|approx)(?![A-Za-z]))|[(){}\[\]]")
# A congruence, `2^{10} \equiv 4 \pmod{5}`, as `normalize` spells it.
_RESIDUE = re.compile(r"(.*)\\equiv(.*?)\\pmod\{[^{}]*\}")
_DECIMAL = re.compile(r"-?[0-9]*\.([0-9]+)|-?[0-9]+")
_FLIPPED = {">": "<", r"\ge": r"\le"}


def _relation(text: str) -> Form | None:
    r"""Form of a relation: `x = 5`, `2x + y = 6`, `1 < x \le 2`, `x \ne 3`, `x \in [0, 1]`, `\{x \mid x > 2\}`."""
    if match := re.fullmatch(r"\\\{ ?[a-zA-Z] ?(?:\\in ?\\mathbb\{R\} ?)?(?:\\mid|\||:)(.*)\\\}", text):
        return _relation(match[1].strip())
    # `2^{10} \equiv 4 \pmod{5}` states 4; `x \equiv 4 \pmod{5}` states no value.
    if match := _RESIDUE.fullmatch(text):
        return None if _UNKNOWN.search(match[1]) else _item(match[2].strip())
    sides = _split(text, _OPERATOR)
    if len(sides) == 1:
        return None
    operators = _operators(text)
    if all(sides) and set(operators) <= {"=", r"\approx"} and (len(sides) > 2 or operators == [r"\approx"]):
        return _chain(sides, operators) or Words(plain_words(text))
    if not all(sides) or len(sides) > 3:
        return Words(plain_words(text))
    if len(sides) == 3:
        # `0 \le x < 1` is `x \in [0, 1)`; any other chain than two inequalities around a variable is words.
        if set(operators) <= set(_FLIPPED):
            sides, operators = sides[::-1], [_FLIPPED[operator] for operator in operators[::-1]]
        if not set(operators) <= {"<", r"\le"} or not _is_variable(sides[1]):
            return Words(plain_words(text))
        kind = ("[" if operators[0] == r"\le" else "(") + ("]" if operators[1] == r"\le" else ")")
        return Named(_name(sides[1]), Ordered(kind, (_item(sides[0]), _item(sides[2]))))
    # From here on there are two sides. A bound of one variable is an interval; anything else stays a relation.
    (left, right), operator = sides, operators[0]
    if operator == "=":
        return _equation(left, right)
    if operator == r"\in":
        return Named(_name(left), _solutions(right)) if _is_name(left) else Words(plain_words(text))
    if operator == r"\ne":
        if not _is_variable(left):
            return Words(plain_words(text))
        return Unordered(tuple(Named(_name(left), item) for item in _all_but((_item(right),)).items))
    if operator in _FLIPPED:
        left, right, operator = right, left, _FLIPPED[operator]
    closed = operator == r"\le"
    if _is_variable(left) and not _is_variable(right):
        return Named(_name(left), Ordered("(]" if closed else "()", (Words(r"-\infty"), _item(right))))
    if _is_variable(right) and not _is_variable(left):
        return Named(_name(right), Ordered("[)" if closed else "()", (_item(left), Words(r"\infty"))))
    return Relation(left, operator, right)


def _operators(text: str) -> list[str]:
    """Relation signs outside all brackets, from left to right."""
    operators, depth = [], 0
    for match in _OPERATOR.finditer(text):
        if match["cut"] is None:
            depth += (match.group() in "([{") - (match.group() in ")]}")
        elif depth == 0:
            operators.append(match["cut"])
    return operators


def _equation(left: str, right: str) -> Form:
    """Form of an equation: Named (`name = value` or reversed), Relation (others with a letter) or Words (`9 = 10`)."""
    if _is_name(right) and not _is_name(left):
        left, right = right, left
    if _is_name(left):
        return Named(_name(left), _item(right))
    if re.search(r"(?<![\\A-Za-z])[A-Za-z]", left + " " + right):
        return Relation(left, "=", right)
    return Words(plain_words(f"{left}={right}")) if left == right else Same((_item(left), _item(right)))


def _chain(sides: list[str], operators: list[str]) -> Form | None:
    r"""Form of a chain of equalities, which may end with an approximation: `x = 2\sqrt{3} \approx 3.46`.

    Formulas before the value (`V = \pi r^2 h = 12`) are passed over, values are not. None without exact value.
    """
    exact = sides[: operators.index(r"\approx") + 1] if r"\approx" in operators else sides
    named = _is_name(exact[0])
    formulas = [side for side in exact[:-1] if _is_name(side) or _UNKNOWN.search(side)]
    # `x = 2x = 18` is an equation to be solved and states no value.
    of_itself = any(_name(exact[0]) in _name(side) for side in formulas[1:])
    if (named and len(exact) == 1) or (formulas and not named) or of_itself:
        return None
    values = [side for side in exact if side not in formulas]
    form = _item(values[0]) if len(values) == 1 else Same(tuple(map(_item, values)))
    # The last side is an approximation. Its decimals, as written, say how closely it must agree.
    if len(exact) < len(sides):
        approximate = quantity(sides[-1])
        decimal = _DECIMAL.match(sides[-1])
        if not isinstance(approximate, Number) or decimal is None:
            return None
        form = Rounded(form, approximate, len(decimal[1] or ""))
    return Named(_name(exact[0]), form) if named else form


_UNKNOWN = re.compile(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])")


_INDEX = r"_\{(?:[^{}]|\{[^{}]*\})*\}"
"""Pattern of an index, which may hold a word: `y_{\\text{min}}`."""


def _is_variable(text: str) -> bool:
    """Whether the text is one letter, possibly Greek or with an index."""
    return bool(re.fullmatch(rf"(?:[A-Za-z]|\\[a-z]+)(?:{_INDEX})?", text.strip())) and "infty" not in text


def _is_name(text: str) -> bool:
    r"""Whether the text names an unknown: names, or their sums and products (`m + n`, `f(2)`, `\angle ABC`)."""
    text = re.sub(rf"{_INDEX}|\^\{{(?:-1|T|\\prime)\}}", "", text)
    text = re.sub(r"(?<=[A-Za-z'])\([^()]*\)", "", text)
    if re.fullmatch(r"\\begin\{vmatrix\}.*\\end\{vmatrix\}|\\(?:int|sum|prod|lim|det)(?![a-z]).*", text):
        return True
    unsolved = re.search(r"\\(?:sqrt|log|ln|pi|pm|approx|infty|to)(?![A-Za-z])", text)
    return unsolved is None and bool(re.search("[A-Za-z]", text) and re.fullmatch(r"[-A-Za-z\\{}|\[\]'!+(), ]+", text))


def _name(text: str) -> str:
    """The name without spaces and text commands, for comparison."""
    return re.sub(r"\\text(?=\{)|\s", "", text)


def _bracketed(text: str) -> Form | None:
    r"""Form of a bracketed text: `(a, b)`, `[a, b)`, `\{a, b\}`, a named point `A(1, 2)`; `(a)` is `a`."""
    # The name of a point is not part of its value.
    text = re.sub(r"^[A-Z] ?(?=\([^()]*,[^()]*\)$)", "", text)
    if text.startswith(r"\{") and text.endswith(r"\}") and closing(text, 1) == len(text) - 1:
        members = _solutions_inside(text[2:-2].strip())
        # A set of one value is that value; but the set of the empty set is not empty.
        return Words(plain_words(text)) if members == (Words(r"\emptyset"),) else Unordered(members)
    if text[:1] not in ("(", "[") or closing(text, 0) != len(text) - 1 or text[-1] not in ")]":
        return None
    kind, inner = text[0] + text[-1], text[1:-1].strip()
    members = tuple(_item(part) for part in _split(inner, _COMMAS))
    if len(members) == 1:
        return _item(inner) if kind == "()" else Ordered(kind, members)
    return Ordered(kind, members)


def _solutions_inside(text: str) -> tuple[Form, ...]:
    r"""Members of a set, from the text inside its braces, where commas never group digits."""
    parts = re.sub(r"(?<=\d),(?=\d)", ", ", text)
    return _without_dots(tuple(_item(sign) for part in _split(parts, _SEPARATORS) for sign in _signs(part)))


def _without_dots(items: tuple[Form, ...]) -> tuple[Form, ...]:
    r"""The items with `1, 2, \ldots, 5` spelled out: numbers of one arithmetic progression, at most 1,000."""
    if len(items) < 3 or items[-2] != Words(r"\ldots"):
        return items
    numbers = [item.value for item in items if isinstance(item, Number) and not item.unit]
    if len(numbers) != len(items) - 1:
        return items
    *first, last = numbers
    step = first[1] - first[0] if len(first) > 1 else Fraction(1)
    count = (last - first[0]) / step + 1 if step else Fraction(0)
    if count.denominator != 1 or not len(first) < count <= 1000:
        return items
    values = [first[0] + step * index for index in range(int(count))]
    return tuple(map(Number, values)) if values[: len(first)] == first else items


# One matrix, with a factor before it or transposed; matrices in matrices are not read.
_MATRIX = re.compile(
    r"(?P<factor>-|-?[0-9]+|-?\\frac\{-?[0-9]+\}\{-?[0-9]+\})? ?(?:\\cdot)? ?[(\[]? ?"
    r"\\begin\{(?P<name>[pbB]?matrix|smallmatrix|array)\}(?:\{[clr| ]*\})?(?!.*\\begin)(?P<rows>.*)\\end\{(?P=name)\}"
    r" ?[)\]]? ?(?P<transposed>\^\{(?:T|\\prime|\\text\{T\})\})?",
)
# A transposed row, `(1, 2)^{T}`, which is a column.
_ROW = re.compile(r"[(\[](?P<entries>[^()\[\]]*,[^()\[\]]*)[)\]] ?\^\{(?:T|\\prime|\\text\{T\})\}")


def _matrix(text: str) -> Form | None:
    r"""Form of a matrix, `\begin{pmatrix} a & b \\ c & d \end{pmatrix}`, by rows; the kind of brackets is ignored."""
    if row := _ROW.fullmatch(text):
        entries = tuple(_item(part) for part in _split(row["entries"], _COMMAS))
        return Ordered(f"{len(entries)}x1 matrix", entries)
    match = _MATRIX.fullmatch(text)
    if match is None:
        return None
    rows = [row.split("&") for row in re.split(r"\\\\", match["rows"]) if row.strip()]
    if len({len(row) for row in rows}) != 1:
        return Words(plain_words(text))
    if match["transposed"]:
        rows = [list(column) for column in zip(*rows, strict=True)]
    factor = rational({None: "1", "-": "-1"}.get(match["factor"], match["factor"])) or Fraction(1)
    entries = tuple(_multiple(factor, _item(entry.strip())) for row in rows for entry in row)
    return Ordered(f"{len(rows)}x{len(rows[0])} matrix", entries)


def _multiple(factor: Fraction, form: Form) -> Form:
    """An entry of a matrix times the factor before the matrix."""
    if factor == 1:
        return form
    if isinstance(form, Number):
        return Number(factor * form.value)
    if isinstance(form, Expression):
        return Expression(rf"\frac{{{factor.numerator}}}{{{factor.denominator}}} \cdot ({form.latex})")
    return form
