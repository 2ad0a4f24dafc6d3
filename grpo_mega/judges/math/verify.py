r"""Decides whether an answer equals the ground truth, at bounded cost and without rewarding tricks.

Exact text first, then exact rational arithmetic; then both texts are normalized (`normalize.py`), their structure is
read (`parse.py`) and compared here, and only what is left, pairs of expressions, goes to sympy in a guarded process
(`symbolic.py`), all pairs of an answer as one question. docs/rewards.md lists what is accepted and refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate

from grpo_mega.judges.math.form import (
    MAX_EXPONENT,
    Expression,
    Form,
    Named,
    Number,
    Numeral,
    Ordered,
    Relation,
    Rounded,
    Same,
    Unordered,
    Words,
)
from grpo_mega.judges.math.normalize import fold_symbols
from grpo_mega.judges.math.parse import parse
from grpo_mega.judges.math.quantity import in_unit
from grpo_mega.judges.math.symbolic import symbolically_equal

MAX_CHARACTERS = 1000
# Parsing time grows exponentially with the depth of nested groups.
MAX_NESTING = 10
MAX_QUESTIONS = 64
"""Largest number of pairs of expressions that one answer may submit to sympy."""

MAGNITUDES = "\u767e\u5343\u4e07\u4ebf"
"""Chinese powers of ten, which units and numbers may have; other numerals are not read."""

_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.[0-9]*)?|\.[0-9]+)"
_NUMBER = re.compile(
    rf"[-+]?(?:{_DECIMAL}(?:[eE](?P<exponent>[-+]?[0-9]+))?|{_INTEGER}\s*/\s*(?P<denominator>{_INTEGER}))"
)
_DECIMAL_COMMA = re.compile(r"(?<![\d,}])(\d+)\{,\}(\d{1,2}|(?=\(\d+\))|(?<=\b0\{,\})\d{3}|\d{4,})(?!\d|\{,\}|,)")
_FONT = re.compile(
    r"\\(?:text|textbf|mathrm|mathbf|boxed)(?![A-Za-z])|\\[,;:!]"
    r"|(?i:\b(?:the )?(?:correct )?(?:option|choice|answer)\b(?: is\b)?:?)"
    r"|(?:\u9009\u9879|\u6545\u9009|\u7b54\u6848|\u9009)[:\uff1a]?"
)
_ONE_OPTION = re.compile(r"(?:\(([A-J])\)\}?|([A-J])\}?(?:[.):]|$))(.*)", re.DOTALL)
_DENIED = (
    r"\b(?:not|wrong|incorrect|false|neither|never|maybe|perhaps|unless|unsure|wait|actually|however|but|or)\b"
    r"|n['\u2019]t\b"
)
_ANOTHER_OPTION = re.compile(rf"(?<![\\A-Za-z])[A-HJ](?![A-Za-z])|(?i:{_DENIED})")
_YES_OR_NO = ("yes", "no", "true", "false")
_SENTENCE = re.compile(
    rf"(?:\\text\{{)? ?({'|'.join(_YES_OR_NO)})[,.;] (?!.*(?:\b(?:yes|no|true)\b|{_DENIED})).*", re.DOTALL
)
AreSame = Callable[[str, str], bool]


def equivalent(answer: str, truth: str) -> bool:
    """Whether `answer` has the value of `truth`. Never raises on hostile text; an empty answer equals nothing."""
    answer, truth = (_DECIMAL_COMMA.sub(r"\1.\2", text.strip()).replace("{,}", ",") for text in (answer, truth))
    if not answer:
        return False
    if answer == truth:
        return True
    # Answers that are not mathematics: yes or no, and letters of options.
    if (word := truth.casefold()) in _YES_OR_NO and (sentence := _SENTENCE.fullmatch(answer.casefold())):
        return sentence[1] == word
    # The truth must be letters alone, but the answer may add the text of its option.
    if (options := _options(truth, "")) and (chosen := _options(answer, ".*")):
        return options == chosen
    # Plain numbers, as most answers are, need neither parsing nor sympy.
    value, expected = _number(answer), _number(truth)
    if value is not None and expected is not None:
        return value == expected
    if not (_well_formed(answer) and _well_formed(truth)):
        return False
    given, wanted = parse(answer), parse(truth)
    # The first comparison treats all pairs of expressions as equal and collects them for sympy; the second uses its
    # verdicts, and can only end earlier.
    pairs: dict[tuple[str, str], bool] = {}
    if not _compare(given, wanted, lambda a, t: pairs.setdefault((a, t), True)):
        return False
    if not pairs:
        return True
    if len(pairs) > MAX_QUESTIONS:
        return False
    verdicts = dict(zip(pairs, symbolically_equal(tuple(pairs)), strict=True))
    return _compare(given, wanted, lambda a, t: verdicts[a, t])


def _options(text: str, rest: str) -> str | None:
    r"""Letters of the options that a text names, `(B)`, `\textbf{(B)}\ 12`, `A, C` or `ACD`; None for other text.

    What follows a single letter, such as the text of its option, must match `rest`, name no other and deny nothing.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    text = _FONT.sub(" ", text).replace(r"\ ", " ").strip(" {}$.*")
    match = _ONE_OPTION.fullmatch(text)
    if match and re.fullmatch(rest, match[3], re.DOTALL) and not _ANOTHER_OPTION.search(match[3]):
        return match[1] or match[2]
    letters = re.sub(r"\band\b|[\s,;(){}\u548c\u3001\uff0c]", "", text)
    # A list of options has no order, but `CAD` without separators may be a word or a product and must be sorted
    # already.
    if re.search(r"\band\b|[,;\u548c\u3001\uff0c]", text):
        letters = "".join(sorted(letters))
    return letters if re.fullmatch("[A-J]+", letters) and list(letters) == sorted({*letters}) else None


def _number(text: str) -> Fraction | None:
    """Exact value of a plain number; None for other text, and for numbers too large to compute."""
    match = _NUMBER.fullmatch(text) if len(text) <= MAX_CHARACTERS else None
    if match is None or abs(int(match["exponent"] or 0)) > MAX_EXPONENT:
        return None
    plain = re.sub(r"[,\s]", "", text)
    return Fraction(plain) if match["denominator"] is None or int(plain.partition("/")[2]) else None


def _well_formed(text: str) -> bool:
    """Whether the text is short, shallow and balanced enough to parse, and not a number that `_number` refused."""
    if len(text) > MAX_CHARACTERS or any(
        c.isnumeric() and not c.isascii() and c not in MAGNITUDES for c in fold_symbols(text)
    ):
        return False
    depth = accumulate((c in "{[(") - (c in "}])") for c in text)
    braces = list(accumulate((c == "{") - (c == "}") for c in text))
    balanced = not braces or (min(braces) >= 0 and braces[-1] == 0)
    out_of_range = _NUMBER.fullmatch(text) is not None and _number(text) is None
    return balanced and max(depth, default=0) <= MAX_NESTING and not out_of_range


def _compare(answer: Form, truth: Form, same: AreSame) -> bool:
    """Whether the whole answer equals the whole truth: the same solutions, of the same unknown where both name one."""
    given, wanted = _record(answer), _record(truth)
    # Lists within any() and all(), here and below: the first comparison must meet every pair of expressions.
    # `x_1 = 2, x_2 = 3` may be two solutions of one unknown or the coordinates of a point.
    if given and not wanted and (roots := _numbered(given)):
        return any([_compare(roots, truth, same), _compare(_point(given), truth, same)])
    if given and wanted:
        return given.keys() == wanted.keys() and all(_equal(given[n], wanted[n], same) for n in wanted)
    answer, truth = (_point(record) if record else form for record, form in ((given, answer), (wanted, truth)))
    (name, items), (expected, solutions) = _solutions(answer), _solutions(truth)
    if isinstance(answer, Relation) or isinstance(truth, Relation) or (name and expected and name != expected):
        left, right = _as_relation(answer), _as_relation(truth)
        return left is not None and right is not None and _equal(left, right, same)
    return _match(items, solutions, same)


def _record(form: Form) -> dict[str, Form] | None:
    """Values of several unknowns by name: `x = 1, y = 2`, `(x, y) = (1, 2)`; None for other forms."""
    if isinstance(form, Named) and isinstance(form.value, Ordered) and form.name[0] == "(":
        names = form.name.strip("()").split(",")
        if form.value.kind == "()" and len(names) == len(form.value.items) == len(set(names)):
            return dict(zip(names, form.value.items, strict=True))
    if isinstance(form, Unordered) and all(isinstance(item, Named) for item in form.items):
        record = {item.name: item.value for item in form.items if isinstance(item, Named)}
        if len(record) == len(form.items) > 1:
            return record
    return None


def _numbered(record: dict[str, Form]) -> Form | None:
    """Values of a record whose names are one letter with indices from 1 on; None for other names."""
    matches = [re.fullmatch(r"(\w+)_\{([0-9])\}", name) for name in record]
    if not all(matches) or [m[2] for m in matches if m] != list("123456789")[: len(record)]:
        return None
    return Unordered(tuple(record.values())) if len({m[1] for m in matches if m}) == 1 else None


def _point(record: dict[str, Form]) -> Form:
    """Values of a record as a tuple: (1, 2) for `y = 2, x = 1`; unusual names keep the given order."""
    names = sorted(record)
    letters = [ord(name) for name in names if len(name) == 1]
    # Alphabetical order is the usual one for a, b, c or x, y; other names give no hint of their order.
    consecutive = letters == list(range(ord(names[0][0]), ord(names[0][0]) + len(names)))
    conventional = consecutive or set(names) <= set("xyz")
    return Ordered("()", tuple(record[name] for name in (names if conventional else record)))


def _solutions(form: Form) -> tuple[str | None, tuple[Form, ...]]:
    """(name shared by all solutions or None, solutions without it)."""
    items = form.items if isinstance(form, Unordered) else (form,)
    names = {item.name for item in items if isinstance(item, Named)}
    # In `x = 1, y = 2 or x = 3, y = 4` only the order tells which values belong together.
    if len(names) > 1:
        return None, (Ordered("several unknowns", items),)
    if len(names) == 1:
        items = tuple(item.value if isinstance(item, Named) else item for item in items)
    if len(items) == 1 and isinstance(items[0], Unordered):
        items = items[0].items
    return min(names, default=None), items


def _as_relation(form: Form) -> Relation | None:
    """The form as a relation, to compare `y = 2x + 1` with `2x - y + 1 = 0`.

    None for a name that equals a constant: that is a solution, and `2x = 10` does not answer `x = 5`.
    """
    if isinstance(form, Named) and isinstance(form.value, (Expression, Words)):
        text = form.value.latex if isinstance(form.value, Expression) else form.value.text
        variable = re.search(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])", text)
        return Relation(form.name, "=", text) if variable else None
    return form if isinstance(form, Relation) else None


def _match(answers: tuple[Form, ...], truths: tuple[Form, ...], same: AreSame) -> bool:
    """Whether two lists have the same values with the same multiplicities, in any order."""
    if len(answers) != len(truths):
        return False
    # Equality is not transitive, as a missing unit equals any, so a greedy assignment could miss one that exists.
    fits = [[i for i, answer in enumerate(answers) if _equal(answer, truth, same)] for truth in truths]
    taken: dict[int, int] = {}

    def assign(truth: int, tried: set[int]) -> bool:
        """Assigns an unused answer to this truth, reassigning others where that helps (Kuhn's algorithm)."""
        for answer in fits[truth]:
            if answer not in tried:
                tried.add(answer)
                if answer not in taken or assign(taken[answer], tried):
                    taken[answer] = truth
                    return True
        return False

    return all(assign(truth, set()) for truth in range(len(truths)))


def _equal(answer: Form, truth: Form, same: AreSame) -> bool:
    """Whether two values are equal. Only a number answers a number: an expression would repeat the question."""
    # Of a truth in several ways, the stated value counts, and its exact form where an approximation stands beside it.
    if isinstance(truth, Same):
        truth = truth.items[-1]
    if isinstance(truth, Rounded):
        truth = truth.exact
    if isinstance(answer, (Number, Expression)) and isinstance(truth, (Number, Expression)):
        answer, truth = in_unit(answer, truth.unit), in_unit(truth, answer.unit)
    match answer, truth:
        case Same(), _:
            return all(
                [_equal(answer.items[-1], truth, same), *(_is_value(item, truth, same) for item in answer.items)]
            )
        case Rounded(), _:
            # A truth with decimals may itself be rounded; then the approximation may be what equals it.
            decimals = isinstance(truth, Number) and truth.value.denominator > 1
            exact, rounded = _equal(answer.exact, truth, same), decimals and _equal(answer.decimal, truth, same)
            return all([exact or rounded, _rounds(answer, same)])
        case Number(), Number():
            return _equal_numbers(answer, truth)
        case Expression() | Number(), Expression():
            return _units_agree(answer.unit, truth.unit) and same(_latex(answer), truth.latex)
        case Number(), Numeral():
            return answer.unit == "" and str(answer.value) == truth.digits
        case Ordered(), Ordered():
            shape = answer.kind == truth.kind and len(answer.items) == len(truth.items)
            pairs = zip(answer.items, truth.items, strict=False)
            return shape and _units_agree(answer.unit, truth.unit) and all(_equal(a, t, same) for a, t in pairs)
        case Unordered(), Unordered():
            return _match(answer.items, truth.items, same)
        case Named(), Named():
            return answer.name == truth.name and _equal(answer.value, truth.value, same)
        case Relation(), Relation():
            return answer.operator == truth.operator and same(_text(answer), _text(truth))
    # What is left are words, numerals, and forms of different kinds.
    return answer == truth


def _is_value(form: Form, truth: Form, same: AreSame) -> bool:
    """Whether a form has the value of the truth, worked out or not."""
    if isinstance(form, Number) and isinstance(truth, Number):
        # Only the stated value must have the truth's unit; elsewhere only the percent sign counts, as it changes the
        # value.
        return _equal_numbers(replace(form, unit="%" if form.unit == "%" else ""), truth)
    if isinstance(form, (Number, Expression)) and isinstance(truth, (Number, Expression)):
        return same(_latex(truth), _latex(form))
    return _equal(form, truth, same)


def _rounds(rounded: Rounded, same: AreSame) -> bool:
    """Whether the approximation of a value is this value, rounded or truncated to the approximation's decimals."""
    exact = rounded.exact.items[-1] if isinstance(rounded.exact, Same) else rounded.exact
    if not isinstance(exact, (Number, Expression)) or not _units_agree(exact.unit, rounded.decimal.unit):
        return False
    if isinstance(exact, Number):
        over = (abs(exact.value) - abs(rounded.decimal.value)) * 10**rounded.places
        return exact.value * rounded.decimal.value >= 0 and Fraction(-1, 2) <= over < 1
    return same(_latex(exact), rf"\approx {_latex(rounded.decimal)} : {rounded.places}")


def _equal_numbers(answer: Number, truth: Number) -> bool:
    """Whether two numbers are equal, in the same unit or with one unit missing.

    `p%` is p/100, and also p where the other side is a bare p of at least 1.
    """
    if (answer.unit == "%") == (truth.unit == "%"):
        return answer.value == truth.value and _units_agree(answer.unit, truth.unit)
    percent, other = (answer, truth) if answer.unit == "%" else (truth, answer)
    if other.unit:
        return False
    return other.value * 100 == percent.value or (other.value == percent.value and abs(other.value) >= 1)


def _units_agree(answer: str, truth: str) -> bool:
    """Whether the units are the same, or one is missing because the question names it."""
    return answer == truth or not answer or not truth


def _latex(form: Number | Expression) -> str:
    """The value as LaTeX for sympy."""
    if isinstance(form, Expression):
        return form.latex
    return rf"\frac{{{form.value.numerator}}}{{{form.value.denominator}}}"


def _text(relation: Relation) -> str:
    """The relation as text for sympy, with spaces around the operator."""
    return f"{relation.left} {relation.operator} {relation.right}"
