r"""Parses the text of an answer into a `Form`: lists of solutions, relations, brackets, matrices.

`parse` never evaluates anything. Unrecognised text becomes `Words`, which equal only the same words: unknown notation
may cost a right answer its reward, but never rewards a wrong one. Single values are parsed in `quantity.py`.
"""

from __future__ import annotations

import functools
import re

from grpo_mega.reward.expression import expression_or_words, plain_words
from grpo_mega.reward.form import Form, Named, Ordered, Relation, Unordered, Words
from grpo_mega.reward.normalize import closing, normalize
from grpo_mega.reward.quantity import quantity


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> Form:
    """Form of any answer. Callers bound length and nesting first."""
    return _solutions(normalize(text))


# -- lists ------------------------------------------------------------------------------------------------------------

_THOUSANDS = r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])"
_SEPARATORS = re.compile(
    rf"(?P<number>{_THOUSANDS})|(?P<cut>,? *(?<![\\A-Za-z])(?:and|or)(?![A-Za-z])|\\cup(?![A-Za-z])|[,;])|[(){{}}\[\]]"
)
_COMMAS = re.compile(r"(?P<cut>[,;])|[(){}\[\]]")


def _split(text: str, pattern: re.Pattern[str]) -> list[str]:
    """Parts of the text between matches of the pattern's group `cut` that are outside all brackets."""
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
    parts = [sign for part in _split(_bare(text), _SEPARATORS) for sign in _signs(part)]
    items = tuple(_item(part) for part in parts)
    if len(items) == 1:
        return items[0]
    return Words(plain_words(text)) if _and(text) and _one_unknown_between(items) else Unordered(items)


def _and(text: str) -> bool:
    return re.search(r"(?<![\\A-Za-z])and(?![A-Za-z])", text) is not None


def _one_unknown_between(items: tuple[Form, ...]) -> bool:
    """Whether all items are intervals of one unknown: joined by `and` these are no union, unlike by commas or `or`."""
    names = {item.name if isinstance(item, Named) and isinstance(item.value, Ordered) else None for item in items}
    return len(names) == 1 and None not in names


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
    for read in (_known_words, _relation, _bracketed, _matrix, quantity):
        form = read(text)
        if form is not None:
            return form
    return expression_or_words(text)


_ALL_REALS = Ordered("()", (Words(r"-\infty"), Words(r"\infty")))
_KNOWN_WORDS: dict[str, Form] = {
    r"\mathbb{R}": _ALL_REALS,
    "all real numbers": _ALL_REALS,
    "all reals": _ALL_REALS,
    r"\infty": Words(r"\infty"),
    r"+\infty": Words(r"\infty"),
    r"-\infty": Words(r"-\infty"),
    r"\{\}": Words(r"\emptyset"),
}


def _known_words(text: str) -> Form | None:
    """Form of words and signs with a fixed meaning, and of the real numbers without one point; None for other text."""
    text = text.replace("{ ", "{").replace(" }", "}")
    if match := re.fullmatch(r"\\mathbb\{R\} ?\\setminus ?\\\{(.*)\\\}", text):
        return _all_but(_item(match[1]))
    text = re.sub(r"(\\infty) $", r"\1", text)
    return _KNOWN_WORDS.get(text) or _KNOWN_WORDS.get(text.replace(" ", "")) or _KNOWN_WORDS.get(text.lower())


def _all_but(point: Form) -> Form:
    """The real numbers without one point."""
    return Unordered((Ordered("()", (Words(r"-\infty"), point)), Ordered("()", (point, Words(r"\infty")))))


_OPERATOR = re.compile(r"(?P<cut>=|<|>|\\(?:le|ge|ne|in)(?![A-Za-z]))|[(){}\[\]]")
_FLIPPED = {">": "<", r"\ge": r"\le"}


def _relation(text: str) -> Form | None:
    r"""Form of a relation: `x = 5`, `2x + y = 6`, `1 < x \le 2`, `x \ne 3`, `x \in [0, 1]`, `\{x \mid x > 2\}`."""
    if match := re.fullmatch(r"\\\{ ?[a-zA-Z] ?(?:\\in ?\\mathbb\{R\} ?)?(?:\\mid|\||:)(.*)\\\}", text):
        return _relation(match[1].strip())
    sides = _split(text, _OPERATOR)
    if len(sides) == 1:
        return None
    operators = _operators(text)
    if not all(sides) or len(sides) > 3:
        return Words(plain_words(text))
    if len(sides) == 3:
        return _between(sides, operators) or Words(plain_words(text))
    (left, right), operator = sides, operators[0]
    if operator == "=":
        return _equation(left, right)
    if operator == r"\in":
        return Named(_name(left), _solutions(right)) if _is_name(left) else Words(plain_words(text))
    if operator == r"\ne":
        return _named_all(left, _all_but(_item(right))) if _is_variable(left) else Words(plain_words(text))
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


def _between(sides: list[str], operators: list[str]) -> Form | None:
    r"""Form of a chain of two inequalities: `0 \le x < 1` is `x \in [0, 1)`; None for any other chain."""
    if set(operators) <= set(_FLIPPED):
        sides, operators = sides[::-1], [_FLIPPED[operator] for operator in operators[::-1]]
    if not set(operators) <= {"<", r"\le"} or not _is_variable(sides[1]):
        return None
    kind = ("[" if operators[0] == r"\le" else "(") + ("]" if operators[1] == r"\le" else ")")
    return Named(_name(sides[1]), Ordered(kind, (_item(sides[0]), _item(sides[2]))))


def _named_all(name: str, form: Form) -> Form:
    """A form with each of its members turned into an equation for `name`."""
    assert isinstance(form, Unordered)
    return Unordered(tuple(Named(_name(name), item) for item in form.items))


def _equation(left: str, right: str) -> Form:
    """Form of an equation: Named (`name = value` or reversed), Relation (others with a letter) or Words (`9 = 10`)."""
    if _is_name(right) and not _is_name(left):
        left, right = right, left
    if _is_name(left):
        return Named(_name(left), _item(right))
    if re.search(r"(?<![\\A-Za-z])[A-Za-z]", left + " " + right):
        return Relation(left, "=", right)
    return Words(plain_words(f"{left}={right}"))


def _is_variable(text: str) -> bool:
    """Whether the text is one letter, possibly Greek or with an index."""
    return bool(re.fullmatch(r"(?:[A-Za-z]|\\[a-z]+)(?:_\{[^{}]*\})?", text.strip())) and "infty" not in text


def _is_name(text: str) -> bool:
    r"""Whether the text names an unknown: names, or their sums and products (`m + n`, `f(2)`, `\angle ABC`)."""
    text = re.sub(r"_\{[^{}]*\}|(?<=[A-Za-z])\([^()]*\)", "", text)
    unsolved = re.search(r"\\(?:sqrt|sin|cos|tan|log|ln|pi|pm|approx|infty|to)(?![A-Za-z])", text)
    return unsolved is None and bool(re.search("[A-Za-z]", text) and re.fullmatch(r"[-A-Za-z\\{}|\[\]'+(), ]+", text))


def _name(text: str) -> str:
    """The name without spaces and text commands, for comparison."""
    return re.sub(r"\\text(?=\{)|\s", "", text)


def _bracketed(text: str) -> Form | None:
    r"""Form of a bracketed text: `(a, b)`, `[a, b)`, `\{a, b\}`, a named point `A(1, 2)`; `(a)` is `a`."""
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
    return tuple(_item(sign) for part in _split(parts, _SEPARATORS) for sign in _signs(part))


_MATRIX = re.compile(
    r"\\begin\{([pbB]?matrix|smallmatrix|array)\}(?:\{[clr| ]*\})?(?!.*\\begin)(.*)\\end\{\1\}",
)


def _matrix(text: str) -> Form | None:
    r"""Form of a matrix, `\begin{pmatrix} a & b \\ c & d \end{pmatrix}`, by rows; the kind of brackets is ignored."""
    match = _MATRIX.fullmatch(text)
    if match is None:
        return None
    rows = [row.split("&") for row in re.split(r"\\\\", match[2]) if row.strip()]
    if len({len(row) for row in rows}) != 1:
        return Words(plain_words(text))
    entries = tuple(_item(entry.strip()) for row in rows for entry in row)
    return Ordered(f"{len(rows)}x{len(rows[0])} matrix", entries)
