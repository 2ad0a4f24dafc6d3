r"""Parses one value with its unit: numbers, ratios, times of day, numerals in a base, and expressions.

The unit stands before the value (`\$18`) or after it (`12\text{ cm}^2`, `25%`, `90^{\circ}`); `units.py` has the names.
"""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction

from grpo_mega.judges.math.form import (
    Expression,
    Form,
    Number,
    Numeral,
    Ordered,
    Words,
    expression_or_words,
    plain_words,
    rational,
)
from grpo_mega.judges.math.normalize import closing
from grpo_mega.judges.math.units import SIGNS, UNITS, unit_name

_SIGN = re.compile(r"(-?) ?(" + "|".join(re.escape(sign) for sign in SIGNS) + r") ?(?=[-\d.\\])")
# A unit in a font command or with a prefix that only units have: `5 \mu\text{m}`, `3 k\Omega`, `12\text{ cm}`.
_MARKED_UNIT = re.compile(
    r"(?<=[\d)}]) ?(?=\\mu ?\\text\{|\\mu ?[A-Za-z]|(?:[kM]|\\text\{[kM]\})? ?\\Omega)|(?<=[\d)}A-Za-z]) ?(?=\\text\{)"
)
_CHINESE_UNIT = re.compile(r"(?<=[\d)}]) ?(?=\(?[\u4e00-\u9fff])")
# A unit in plain letters, as a rule of two or more, since one may be a variable: `12 cm`, `2\pi cm`, `60 /hour`.
_WORD_UNIT = re.compile(
    r"(?<=[\d)}%]) ?(?=[A-Za-z]{2}|[Tt]-shirt|a |L$|[ap]\.m)|(?<=\\pi) (?=[a-z]{2})|(?<=\d) ?(?=/ ?[A-Za-z]{3})"
    # `10 m/s` is a speed: a quotient of variables would be written with \frac.
    r"|(?<=\d) (?=[A-Za-z](?:\^\{[23]\})?/[A-Za-z])"
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
# English ordinals as they are written: 1st, 22nd and 13th, but neither 13rd nor 2th.
_ORDINAL = re.compile(r"((?:\d*[02-9])?(?:1st|2nd|3rd|[04-9]th)|\d*1[0-9]th)")
# A unit of one letter, to be read as one only beside a truth that has it: `5 m`, `10 m/s`.
_LETTER_UNIT = re.compile(r"(.*(?:[\d)}]|\\pi)) ?([A-Za-z](?:\^\{[23]\})?(?: ?/ ?[A-Za-z]+(?:\^\{[23]\})?)?)")
_AMOUNT = r"([0-9.]+ ?(?:\\text\{ ?[A-Za-z. ]+\}|[A-Za-z]+))"
_TWO_UNITS = re.compile(rf"{_AMOUNT},? ?(?:\\text\{{ ?and ?\}} ?)?{_AMOUNT}")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")


def quantity(text: str) -> Form | None:
    r"""Form of a number or expression with its unit: `\$18`, `18 dollars`, `12\text{ cm}^2`, `25%`, `90^{\circ}`."""
    if (number := rational(text)) is not None:
        return Number(number)
    if _ORDINAL.fullmatch(text):
        return Number(Fraction(text[:-2]), "ordinal")
    # `3 hours 20 minutes` is compared unit by unit, without conversion.
    if match := _TWO_UNITS.fullmatch(text):
        parts = tuple(quantity(part) for part in match.groups())
        if all(isinstance(part, Number) and part.unit for part in parts):
            return Ordered("units", tuple(part for part in parts if part))
    sign = _SIGN.match(text)
    body, suffix = _split_unit(sign[1] + text[sign.end() :] if sign else text)
    currency = SIGNS[sign[2]] if sign else ""
    value = _ratio(body) or _numeral(body) or _simple(body)
    if suffix.startswith("/"):
        units = {currency + suffix}
    elif currency and suffix == "fewer":
        units = {f"fewer {currency}"}
    else:
        units = {currency, suffix} - {""}
    # Without a unit, `value` counts if something was split off (`5 more`) or if it is a ratio or a numeral; the caller
    # reads other text.
    if not units:
        return value if body != text or isinstance(value, (Ordered, Numeral)) else None
    # Sign and suffix may name the same unit, `\$18 dollars`; a value with two different units is rejected.
    if len(units) == 1:
        unit = min(units)
        if isinstance(value, (Number, Expression)) or (isinstance(value, Ordered) and unit in ("am", "pm")):
            return replace(value, unit=unit)
    return Words(plain_words(text))


def _split_unit(text: str) -> tuple[str, str]:
    """(text of the value, name of the unit after it); "" when there is no unit."""
    if match := _TEMPERATURE.fullmatch(text):
        return match[1], f"degree {match[2][0].upper()}"
    for suffix, unit in _SUFFIXES.items():
        value = text.removesuffix(suffix).strip()
        # `\sin 15^{\circ}` is the sine of an angle and f' a derivative.
        belongs = _TRIGONOMETRY.search(value) if unit == "degree" else unit != "%" and rational(value) is None
        if text.endswith(suffix) and not belongs:
            return value, unit
    for pattern in (_MARKED_UNIT, _CHINESE_UNIT, _WORD_UNIT):
        if match := pattern.search(text):
            value, rest = text[: match.start()].strip(), text[match.end() :]
            apart = pattern is _CHINESE_UNIT or text[match.start() :].startswith((" ", r"\text", "/"))
            name = unit_name(rest, counted=apart and rational(value) is not None)
            # Letters directly after a number are a unit only if `UNITS` has them: `3mg` may be a product of variables.
            if name is not None and (apart or rest in UNITS or "\\" in rest):
                return value, name
    return text, ""


def in_unit(form: Number | Expression, unit: str) -> Number | Expression:
    r"""Reads `5 m` as five metres if `unit`, the other side's unit, is m; without that, m could be a variable.

    `5\text{ m}` is unambiguous.
    """
    if not isinstance(form, Expression) or form.unit or not unit:
        return form
    match = _LETTER_UNIT.fullmatch(form.latex)
    if match is None or unit_name(match[2], counted=False) != unit:
        return form
    value = _simple(match[1])
    return replace(value, unit=unit) if isinstance(value, (Number, Expression)) else form


def _simple(text: str) -> Form:
    """Form of a number or an expression, without surrounding parentheses."""
    if text.startswith("(") and closing(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    number = rational(text)
    return expression_or_words(text) if number is None else Number(number)


def _ratio(text: str) -> Form | None:
    """Form of a ratio (`3:4`, `3 to 4`) or a time of day; None for other text."""
    parts = re.split(r" ?: ?| to ", text)
    numbers = [rational(part) for part in parts]
    if len(parts) == 1 or None in numbers:
        return None
    return Ordered(":", tuple(Number(number) for number in numbers if number is not None))


_BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9"}
_IN_BASE = re.compile(r"(?:\\text\{)?\(?(?:in)?base([0-9]+|[a-z]+)\)?\}?$")
_NUMERAL = re.compile(r"\(?([0-9][0-9A-F.]*)\)?_\{(?:\\text\{)?\(?(?:base)?([0-9]{1,2}|[a-z]+)\)?\}?\}")


def _numeral(text: str) -> Form | None:
    """Form of digits with their base as index, `1011_2`; None for other text."""
    match = _NUMERAL.fullmatch(_IN_BASE.sub(r"_{\1}", text.replace(" ", "")))
    return None if match is None else Numeral(match[1], _BASES.get(match[2], match[2]))
