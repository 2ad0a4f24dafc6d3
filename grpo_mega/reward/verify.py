r"""Decides whether an answer equals the ground truth, at bounded cost and without paying for tricks.

Exact text first, then exact rational arithmetic, and only for what is left math-verify in a guarded process
(`symbolic.py`). math-verify is lenient by design; the rules here close what a policy would find: `\boxed{9=10}` counts
as 10, `9 \to 10` as 10, `9 10` as 19, the question itself (`3+16`) as its answer, any anagram of a word as the word.
"""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import accumulate

from grpo_mega.reward.symbolic import symbolically_equal

MAX_CHARACTERS = 1000
MAX_NESTING = 10  # the time to parse nested groups grows exponentially
MAX_EXPONENT = 1000

_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.[0-9]*)?|\.[0-9]+)"
_NUMBER = re.compile(
    rf"[-+]?(?:{_DECIMAL}(?:[eE](?P<exponent>[-+]?[0-9]+))?|{_INTEGER}\s*/\s*(?P<denominator>{_INTEGER}))"
)
_LATEX_FRACTION = (
    rf"(?:{_INTEGER}\s*)?\\[dt]?frac\s*(?:\{{\s*[-+]?{_INTEGER}\s*\}}|[0-9])\s*(?:\{{\s*{_INTEGER}\s*\}}|[0-9])"
)
_ONE_NUMBER = re.compile(
    r"(?:[\s${(]|\\[(\[]|\\(?:text|mathrm|mathbf|left)\b)*[-+]?\s*"
    rf"(?:{_LATEX_FRACTION}|{_INTEGER}\s*/\s*{_INTEGER}|{_DECIMAL})"
    r"(?:[\s$})%.]|\\[)\]%,;! ]|\\right\b|\^\{?\\circ\b|\\(?:text|mathrm|mbox)\{[A-Za-z .]*\})*"
)
_WORDS = re.compile(r"[A-Za-z ]{3,}")
_RELATION = re.compile(r"=|\\(?:to|approx|equiv|sim|implies|iff|mapsto|[A-Za-z]*[aA]rrow)\b|\\boxed\b")


def equivalent(answer: str, truth: str) -> bool:
    """Whether `answer` has the value of `truth`. Never raises on hostile text; an empty answer equals nothing."""
    answer, truth = (text.strip().replace("{,}", ",") for text in (answer, truth))
    if not answer:
        return False
    if answer == truth:
        return True
    value, expected = _number(answer), _number(truth)
    if value is not None and expected is not None:
        return value == expected
    comparable = _well_formed(answer) and _well_formed(truth) and _same_kind(answer, truth)
    return comparable and symbolically_equal(answer, truth)


def _number(text: str) -> Fraction | None:
    """The exact value of a plain number; None when it is not one, or too large to be worth computing."""
    match = _NUMBER.fullmatch(text) if len(text) <= MAX_CHARACTERS else None
    if match is None or abs(int(match["exponent"] or 0)) > MAX_EXPONENT:
        return None
    plain = re.sub(r"[,\s]", "", text)
    return Fraction(plain) if match["denominator"] is None or int(plain.partition("/")[2]) else None


def _well_formed(text: str) -> bool:
    """Whether the text is short, shallow and balanced enough for a parser, and no number that `_number` refused."""
    if len(text) > MAX_CHARACTERS or any(c.isnumeric() and not c.isascii() for c in text):
        return False
    depth = accumulate((c in "{[(") - (c in "}])") for c in text)
    braces = list(accumulate((c == "{") - (c == "}") for c in text))
    balanced = not braces or (min(braces) >= 0 and braces[-1] == 0)
    out_of_range = _NUMBER.fullmatch(text) is not None and _number(text) is None
    return balanced and max(depth, default=0) <= MAX_NESTING and not out_of_range


def _same_kind(answer: str, truth: str) -> bool:
    """Whether the answer states one value, as the truth does: a number for a number, no chain of values for a value.

    A truth made of words is compared as text only: to math-verify a word is a product of its letters.
    """
    if _WORDS.fullmatch(truth):
        return False
    if _ONE_NUMBER.fullmatch(truth) and not _ONE_NUMBER.fullmatch(answer):
        return False
    return all(relation in truth for relation in _RELATION.findall(answer))
