r"""Reads the structure of an answer: numbers with units, lists, tuples, intervals, matrices, equations, words.

`parse` never evaluates anything. What it cannot place is `Words`, which equal only the same words; so an unknown
notation costs a right answer its reward, and never pays a wrong one.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from fractions import Fraction

from grpo_mega.reward.normalize import closing, normalize
from grpo_mega.reward.rational import rational
from grpo_mega.reward.units import SIGNS, unit_name


@dataclass(frozen=True)
class Number:
    """A rational number, exactly, and the unit behind it ("" for none)."""

    value: Fraction
    unit: str = ""


@dataclass(frozen=True)
class Expression:
    """LaTeX of one expression without relations or commas, for the symbolic comparison, and the unit behind it."""

    latex: str
    unit: str = ""


@dataclass(frozen=True)
class Words:
    """Text, single letters and notation that nothing here knows: equal to the same text only."""

    text: str


@dataclass(frozen=True)
class Numeral:
    """Digits in a base, as they stand: `1011_2`."""

    digits: str
    base: str


@dataclass(frozen=True)
class Ordered:
    """Entries whose order counts. `kind` tells points and intervals by brackets, ratios by `:`, matrices by size."""

    kind: str
    items: tuple[Form, ...]
    unit: str = ""


@dataclass(frozen=True)
class Unordered:
    """Several solutions, a set, or a union of intervals."""

    items: tuple[Form, ...]


@dataclass(frozen=True)
class Named:
    """`name = value`, or for an interval an inequality or membership of that name."""

    name: str
    value: Form


@dataclass(frozen=True)
class Relation:
    r"""`left operator right` with `=`, `<` or `\le`, that is not solved for a name."""

    left: str
    operator: str
    right: str


Form = Number | Expression | Words | Numeral | Ordered | Unordered | Named | Relation


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> Form:
    """The structure of an answer, whatever it is. Callers bound length and nesting first."""
    return _solutions(normalize(text))


# -- lists ------------------------------------------------------------------------------------------------------------

_THOUSANDS = r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])"
_SEPARATORS = re.compile(
    rf"(?P<number>{_THOUSANDS})|(?P<cut>,? *(?<![\\A-Za-z])(?:and|or)(?![A-Za-z])|\\cup(?![A-Za-z])|[,;])|[(){{}}\[\]]"
)
_COMMAS = re.compile(r"(?P<cut>[,;])|[(){}\[\]]")


def _split(text: str, pattern: re.Pattern[str]) -> list[str]:
    """The parts between the `cut` matches of the pattern that stand outside all brackets."""
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
    r"""The whole answer: one value, or several separated by commas, `and`, `or`, `\cup`, or meant by `\pm`."""
    parts = [sign for part in _split(_bare(text), _SEPARATORS) for sign in _signs(part)]
    items = tuple(_item(part) for part in parts)
    return items[0] if len(items) == 1 else Unordered(items)


def _signs(text: str) -> list[str]:
    r"""Both readings of `\pm`; a set has them inside."""
    if text.startswith(r"\{") or not re.search(r"\\(?:pm|mp)(?![A-Za-z])", text):
        return [text]
    upper = re.sub(r"\\mp(?![A-Za-z])", "-", re.sub(r"\\pm(?![A-Za-z])", "+", text))
    lower = re.sub(r"\\mp(?![A-Za-z])", "+", re.sub(r"\\pm(?![A-Za-z])", "-", text))
    return [re.sub(r"(^|[=(,{])\s*\+", r"\1", reading) for reading in (upper, lower)]


def _bare(text: str) -> str:
    r"""Without braces or `\text{}` around the whole."""
    while text.startswith("{") and closing(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    match = re.fullmatch(r"\\text\{([^{}]*)\}", text)
    return match[1].strip() if match else text


# -- one value --------------------------------------------------------------------------------------------------------


def _item(text: str) -> Form:
    """One member of a list: the first reading that fits."""
    text = _bare(text)
    for reading in (_known_words, _relation, _bracketed, _matrix, _quantity):
        form = reading(text)
        if form is not None:
            return form
    return _leaf(text)


_EVERYTHING = Ordered("()", (Words(r"-\infty"), Words(r"\infty")))
_KNOWN_WORDS: dict[str, Form] = {
    r"\mathbb{R}": _EVERYTHING,
    "all real numbers": _EVERYTHING,
    "all reals": _EVERYTHING,
    r"\infty": Words(r"\infty"),
    r"+\infty": Words(r"\infty"),
    r"-\infty": Words(r"-\infty"),
    r"\{\}": Words(r"\emptyset"),
}


def _known_words(text: str) -> Form | None:
    """Words and signs with a meaning of their own, and everything but one point."""
    text = text.replace("{ ", "{").replace(" }", "}")
    if match := re.fullmatch(r"\\mathbb\{R\} ?\\setminus ?\\\{(.*)\\\}", text):
        return _all_but(_item(match[1]))
    text = re.sub(r"(\\infty) $", r"\1", text)
    return _KNOWN_WORDS.get(text) or _KNOWN_WORDS.get(text.replace(" ", "")) or _KNOWN_WORDS.get(text.lower())


def _all_but(point: Form) -> Form:
    """The real numbers without one."""
    return Unordered((Ordered("()", (Words(r"-\infty"), point)), Ordered("()", (point, Words(r"\infty")))))


_OPERATOR = re.compile(r"(?P<cut>=|<|>|\\(?:le|ge|ne|in)(?![A-Za-z]))|[(){}\[\]]")
_FLIPPED = {">": "<", r"\ge": r"\le"}


def _relation(text: str) -> Form | None:
    r"""`x = 5`, `2x + y = 6`, `1 < x \le 2`, `x \ne 3`, `x \in [0, 1]`, `\{x \mid x > 2\}`."""
    if match := re.fullmatch(r"\\\{ ?[a-zA-Z] ?(?:\\in ?\\mathbb\{R\} ?)?(?:\\mid|\||:)(.*)\\\}", text):
        return _relation(match[1].strip())
    sides = _split(text, _OPERATOR)
    if len(sides) == 1:
        return None
    operators = _operators(text)
    if not all(sides) or len(sides) > 3:
        return Words(_plain(text))
    if len(sides) == 3:
        return _between(sides, operators) or Words(_plain(text))
    (left, right), operator = sides, operators[0]
    if operator == "=":
        return _equation(left, right)
    if operator == r"\in":
        return Named(_name(left), _solutions(right)) if _is_name(left) else Words(_plain(text))
    if operator == r"\ne":
        return _named_all(left, _all_but(_item(right))) if _is_variable(left) else Words(_plain(text))
    if operator in _FLIPPED:
        left, right, operator = right, left, _FLIPPED[operator]
    closed = operator == r"\le"
    if _is_variable(left) and not _is_variable(right):
        return Named(_name(left), Ordered("(]" if closed else "()", (Words(r"-\infty"), _item(right))))
    if _is_variable(right) and not _is_variable(left):
        return Named(_name(right), Ordered("[)" if closed else "()", (_item(left), Words(r"\infty"))))
    return Relation(left, operator, right)


def _operators(text: str) -> list[str]:
    """The relation signs outside all brackets, from left to right."""
    found, depth = [], 0
    for match in _OPERATOR.finditer(text):
        if match["cut"] is None:
            depth += (match.group() in "([{") - (match.group() in ")]}")
        elif depth == 0:
            found.append(match["cut"])
    return found


def _between(sides: list[str], operators: list[str]) -> Form | None:
    r"""`0 \le x < 1` is `x \in [0, 1)`; any other chain is nothing."""
    if set(operators) <= set(_FLIPPED):
        sides, operators = sides[::-1], [_FLIPPED[operator] for operator in operators[::-1]]
    if not set(operators) <= {"<", r"\le"} or not _is_variable(sides[1]):
        return None
    kind = ("[" if operators[0] == r"\le" else "(") + ("]" if operators[1] == r"\le" else ")")
    return Named(_name(sides[1]), Ordered(kind, (_item(sides[0]), _item(sides[2]))))


def _named_all(name: str, form: Form) -> Form:
    """The name in front of every member."""
    assert isinstance(form, Unordered)
    return Unordered(tuple(Named(_name(name), item) for item in form.items))


def _equation(left: str, right: str) -> Form:
    """`name = value` or `value = name`; or an equation, when it has any letter; or nothing (`9 = 10`)."""
    if _is_name(right) and not _is_name(left):
        left, right = right, left
    if _is_name(left):
        return Named(_name(left), _item(right))
    if re.search(r"(?<![\\A-Za-z])[A-Za-z]", left + " " + right):
        return Relation(left, "=", right)
    return Words(_plain(f"{left}={right}"))


def _is_variable(text: str) -> bool:
    """One letter, perhaps Greek, perhaps with an index."""
    return bool(re.fullmatch(r"(?:[A-Za-z]|\\[a-z]+)(?:_\{[^{}]*\})?", text.strip())) and "infty" not in text


def _is_name(text: str) -> bool:
    r"""Names, and sums and products of names, which what was asked for may be: `m + n`, `f(2)`, `\angle ABC`."""
    text = re.sub(r"_\{[^{}]*\}|(?<=[A-Za-z])\([^()]*\)", "", text)
    unsolved = re.search(r"\\(?:sqrt|sin|cos|tan|log|ln|pi|pm|approx|infty|to)(?![A-Za-z])", text)
    return unsolved is None and bool(re.search("[A-Za-z]", text) and re.fullmatch(r"[-A-Za-z\\{}|\[\]'+(), ]+", text))


def _name(text: str) -> str:
    """A name without spaces."""
    return re.sub(r"\\text(?=\{)|\s", "", text)


def _bracketed(text: str) -> Form | None:
    r"""`(a, b)`, `[a, b)`, `\{a, b\}`, a named point `A(1, 2)`; `(a)` is `a`."""
    text = re.sub(r"^[A-Z] ?(?=\([^()]*,[^()]*\)$)", "", text)
    if text.startswith(r"\{") and text.endswith(r"\}") and closing(text, 1) == len(text) - 1:
        members = _solutions_inside(text[2:-2].strip())
        return Unordered(members)
    if text[:1] not in ("(", "[") or closing(text, 0) != len(text) - 1 or text[-1] not in ")]":
        return None
    kind, inner = text[0] + text[-1], text[1:-1].strip()
    members = tuple(_item(part) for part in _split(inner, _COMMAS))
    if len(members) == 1:
        return _item(inner) if kind == "()" else Ordered(kind, members)
    return Ordered(kind, members)


def _solutions_inside(text: str) -> tuple[Form, ...]:
    r"""Members of a set; commas inside it never group digits."""
    parts = re.sub(r"(?<=\d),(?=\d)", ", ", text)
    return tuple(_item(sign) for part in _split(parts, _SEPARATORS) for sign in _signs(part))


_MATRIX = re.compile(
    r"\\begin\{([pbB]?matrix|smallmatrix|array)\}(?:\{[clr| ]*\})?(?!.*\\begin)(.*)\\end\{\1\}",
)


def _matrix(text: str) -> Form | None:
    r"""`\begin{pmatrix} a & b \\ c & d \end{pmatrix}`, by rows; which brackets it has does not matter."""
    match = _MATRIX.fullmatch(text)
    if match is None:
        return None
    rows = [row.split("&") for row in re.split(r"\\\\", match[2]) if row.strip()]
    if len({len(row) for row in rows}) != 1:
        return Words(_plain(text))
    entries = tuple(_item(entry.strip()) for row in rows for entry in row)
    return Ordered(f"{len(rows)}x{len(rows[0])} matrix", entries)


# -- values with units ------------------------------------------------------------------------------------------------

_SIGN = re.compile(r"(-?) ?(" + "|".join(re.escape(sign) for sign in SIGNS) + r") ?(?=[-\d.\\])")
_MARKED_UNIT = re.compile(r"(?<=[\d)}A-Za-z]) ?(?=\\text\{)")
_WORD_UNIT = re.compile(
    r"(?<=[\d)}%]) ?(?=[A-Za-z]{2}|[Tt]-shirt|a |L$|[ap]\.m)|(?<=\\pi) (?=[a-z]{2})|(?<=\d) ?(?=/ ?[A-Za-z]{3})"
    r"|(?<=\d) (?=[A-Za-z](?:\^\{[23]\})?/[A-Za-z])"  # `10 m/s`: a quotient of two variables would stand in a \frac
)
_SUFFIXES = {
    "%": "%",
    r"^{\circ}": "degree",
    "''": "in",
    '"': "in",
    "'": "ft",
    r"\$": "dollar",
    "$": "dollar",
    r"\euro": "euro",
    r"\pounds": "pound sterling",
}
_TEMPERATURE = re.compile(
    r"(.*\d) ?(?:\^\{\\circ\}|(?:\\text\{ ?)?degrees?) ?(?:\\text\{)? ?(C|F|[Cc]elsius|[Ff]ahrenheit) ?\}?"
)
_ORDINAL = re.compile(r"((?:\d*[02-9])?(?:1st|2nd|3rd|[04-9]th)|\d*1[0-9]th)")
_LETTER_UNIT = re.compile(r"(.*(?:[\d)}]|\\pi)) ?([A-Za-z](?:\^\{[23]\})?(?: ?/ ?[A-Za-z]+(?:\^\{[23]\})?)?)")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")


def _quantity(text: str) -> Form | None:
    r"""A number, ratio or expression with its unit: `\$18`, `18 dollars`, `12\text{ cm}^2`, `25%`, `90^{\circ}`."""
    if (number := rational(text)) is not None:
        return Number(number)
    if _ORDINAL.fullmatch(text):
        return Number(Fraction(text[:-2]), "ordinal")
    sign = _SIGN.match(text)
    body, suffix = _cut_unit(sign[1] + text[sign.end() :] if sign else text)
    currency = SIGNS[sign[2]] if sign else ""
    value = _ratio(body) or _numeral(body) or _simple(body)
    if suffix.startswith("/"):
        units = {currency + suffix}
    elif currency and suffix == "fewer":
        units = {f"fewer {currency}"}
    else:
        units = {currency, suffix} - {""}
    if not units:
        return value if body != text or isinstance(value, (Ordered, Numeral)) else None
    if len(units) == 1:
        unit = min(units)
        if isinstance(value, (Number, Expression)) or (isinstance(value, Ordered) and unit in ("am", "pm")):
            return replace(value, unit=unit)
    return Words(_plain(text))


def _cut_unit(text: str) -> tuple[str, str]:
    """The text before its unit, and the unit; "" when it has none."""
    if match := _TEMPERATURE.fullmatch(text):
        return match[1], f"degree {match[2][0].upper()}"
    for suffix, unit in _SUFFIXES.items():
        value = text.removesuffix(suffix).strip()
        # `\sin 15^{\circ}` is the sine of an angle and f' a derivative.
        bound = _TRIGONOMETRY.search(value) if unit == "degree" else unit != "%" and rational(value) is None
        if text.endswith(suffix) and not bound:
            return value, unit
    for pattern in (_MARKED_UNIT, _WORD_UNIT):
        if match := pattern.search(text):
            value, rest = text[: match.start()].strip(), text[match.end() :]
            apart = text[match.start() :].startswith((" ", r"\text", "/"))
            name = unit_name(rest, counted=apart and rational(value) is not None)
            if name is not None:
                return value, name
    return text, ""


def in_unit(form: Number | Expression, unit: str) -> Number | Expression:
    r"""`5 m` as five metres when `unit`, that of the other side, is m; alone it could be a variable and stays as it is.

    What is written `5\text{ m}` needs no such help.
    """
    if not isinstance(form, Expression) or form.unit or not unit:
        return form
    match = _LETTER_UNIT.fullmatch(form.latex)
    if match is None or unit_name(match[2], counted=False) != unit:
        return form
    value = _simple(match[1])
    return replace(value, unit=unit) if isinstance(value, (Number, Expression)) else form


def _simple(text: str) -> Form:
    """A number or an expression, perhaps in parentheses."""
    if text.startswith("(") and closing(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    number = rational(text)
    return _leaf(text) if number is None else Number(number)


def _ratio(text: str) -> Form | None:
    """`3:4`, `3 to 4`, and times of day."""
    parts = re.split(r" ?: ?| to ", text)
    numbers = [rational(part) for part in parts]
    if len(parts) == 1 or None in numbers:
        return None
    return Ordered(":", tuple(Number(number) for number in numbers if number is not None))


_BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9"}
_NUMERAL = re.compile(r"\(?([0-9][0-9A-F.]*)\)?_\{(?:\\text\{)?([0-9]{1,2}|[a-z]+)\}?\}")


def _numeral(text: str) -> Form | None:
    """Digits with the base as index."""
    match = _NUMERAL.fullmatch(text.replace(" ", ""))
    return None if match is None else Numeral(match[1], _BASES.get(match[2], match[2]))


# -- leaves -----------------------------------------------------------------------------------------------------------

_FUNCTIONS = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp max min gcd lcm"
_GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau phi varphi chi "
    "psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
)
_COMMANDS = frozenset(f"frac sqrt binom cdot pi circ infty lfloor rfloor lceil rceil {_FUNCTIONS} {_GREEK}".split())
_ALLOWED = re.compile(r"[-A-Za-z0-9+*/^_(){}\[\]|!. \\]+")
_PRODUCT_OF_LETTERS = re.compile(r"[a-z]{1,2}|[abckmnpqrstxyz]{3}|[A-Z]")
_SHORT_WORDS = re.compile("no|on|in|at|up|it|is|an|as|be|so|he|we|me|my|us|am|pm")
_CONFUSED = re.compile(r"\d \d|\s!|!!|[A-Za-z]\d|\.\.|(?<!\d)\.(?!\d)|\\[^A-Za-z]|\|\||[-+*/] ?[+*/]|[-+] ?-|[-+*/^_]$")


def _leaf(text: str) -> Form:
    """An expression when it is written wholly in known notation, else words."""
    bare = re.sub(r"\\([A-Za-z]+)", " ", text)
    commands = re.findall(r"\\([A-Za-z]+)", text)
    known = _ALLOWED.fullmatch(text) and all(command in _COMMANDS for command in commands)
    runs = re.findall(r"[A-Za-z]+", re.sub(r"_\{[A-Za-z0-9]*\}", " ", bare))
    letters = all(_PRODUCT_OF_LETTERS.fullmatch(run) for run in runs)
    word = re.fullmatch(r"[A-Za-z]", text) or _SHORT_WORDS.fullmatch(text)
    if not known or not letters or word or _CONFUSED.search(re.sub(r"_\{[^{}]*\}", " ", text)):
        return Words(_plain(text))
    return Expression(text)


def _plain(text: str) -> str:
    """Words without what does not count: marks of text, articles, quotes, and case, but for names and formulas."""
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).strip(' "')
    if not re.fullmatch(r"[A-Za-z][-A-Za-z0-9 .']*", text):
        return re.sub(r"\s", "", text)
    text = re.sub(r"^(?:option|choice) (?=\(?[A-Z]\)?$)", "", " ".join(text.split()), flags=re.IGNORECASE)
    text = re.sub(r"^(?:the|an?) (?=[A-Za-z])", "", text, flags=re.IGNORECASE)
    name = re.fullmatch(r"[A-Z]+|[A-Za-z]", text) and text not in ("YES", "NO", "TRUE", "FALSE")
    return text if name else text.lower()
