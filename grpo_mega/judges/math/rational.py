"""Exact value of a number in any of its usual spellings."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_EXPONENT = 1000

_INTEGER = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.\d*)?|\.\d+)"
_SIGNED = rf"(?:[-+]? ?{_DECIMAL}|\([-+]? ?{_DECIMAL}\))"
_NUMBERS = [
    re.compile(pattern, re.ASCII)
    for pattern in (
        rf"(?P<decimal>{_DECIMAL})(?:[eE](?P<e>[-+]?\d+))?",
        rf"(?:(?P<decimal>{_DECIMAL}) ?(?:\\cdot|x) ?)?10\^\{{(?P<e>[-+]?\d+)\}}",
        rf"(?P<whole>{_INTEGER}) ?\\frac\{{ ?(?P<part>\d+) ?\}}\{{ ?(?P<of>\d+) ?\}}",
        r"(?P<whole>\d+) (?P<part>\d+)/(?P<of>\d+)",
        rf"\\frac\{{ ?(?P<top>{_SIGNED}) ?\}}\{{ ?(?P<bottom>{_SIGNED}) ?\}}",
        rf"(?P<top>{_SIGNED}) ?/ ?(?P<bottom>{_SIGNED})",
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
        whole, top, bottom = (_plain_decimal(part[name]) for name in ("whole", "part", "of"))
        return whole + top / bottom if 0 < top < bottom else None
    if part.get("repeated"):
        before, repeated = str(part["before"]), str(part["repeated"])
        decimals = len(before.partition(".")[2])
        cycle = Fraction(int(repeated), (10 ** len(repeated) - 1) * 10**decimals)
        return Fraction(f"0{before}0") + cycle
    exponent = part.get("e") or "0"
    if len(exponent) > 6 or abs(int(exponent)) > MAX_EXPONENT:
        return None
    return _plain_decimal(part["decimal"] or "1") * Fraction(10) ** int(exponent)


def _plain_decimal(text: str | None) -> Fraction:
    """Value of a decimal with separators or parentheses."""
    return Fraction(re.sub(r"[,\s()]", "", str(text)))
