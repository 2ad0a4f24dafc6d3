r"""Worker process of `symbolic.py`: `python -P symbolic_worker.py CPU_SECONDS MEMORY_BYTES`.

Writes `ready`, then for every line `[[answer, truth], ...]` on standard input one line `[true, false, ...]`, until the
input ends. The texts are LaTeX of single expressions, or of two with ` = `, ` < ` or ` \le ` between them.

math-verify's parser (latex2sympy) reads them; its comparison is not used, because it rounds to six decimals and is too
lenient. Here two expressions are equal when sympy proves that their difference is zero; evaluation to 60 digits only
rejects early what certainly differs.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import resource
import signal
import sys

import sympy
from latex2sympy2_extended import latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from sympy.core.random import seed

DIGITS = 60
POINTS = (sympy.Rational(13, 7), sympy.Rational(29, 11), sympy.Rational(3, 17))
"""Values of free symbols in the numeric filter; the k-th symbol gets a multiple of them."""

# By default latex2sympy turns letters into lower case, but `A` and `a` are different unknowns.
_CONFIG = ConversionConfig(lowercase_symbols=False)
_DECIMAL = re.compile(r"(\d*)\.(\d+)|(\d+)\.(?!\d)")
_DEGREES = re.compile(r"(\d+|\\frac\{\d+\}\{\d+\})\^\{\\circ\}")
_OPERATOR = re.compile(r" (=|<|\\le) ")
_ROUNDED = re.compile(r"\\approx (.*) : (\d{1,3})")
"""Question whether a value is this decimal, rounded or cut to that many places."""
_UNFINISHED = (sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative)


def equal(answer: str, truth: str) -> bool:
    """Whether two texts are the same expression or relation; text that sympy cannot read equals nothing."""
    try:
        if rounded := _ROUNDED.fullmatch(truth):
            exact, decimal = (sympy.N(_read(text), DIGITS) for text in (answer, rounded[1]))
            # In units of the last place, rounding errs by half a unit at most in either direction, and cutting by less
            # than one unit towards zero.
            over = (abs(exact) - abs(decimal)) * 10 ** int(rounded[2])
            return bool(exact * decimal >= 0 and -0.5 <= over < 1)
        given, wanted = (_OPERATOR.split(text) for text in (answer, truth))
        if len(wanted) == 1:
            one, other = _read(given[0]), _read(wanted[0])
            # Where the truth is 120, `5!` only repeats the question. An unknown that the truth lacks cannot be part of
            # an answer.
            counting = (sympy.factorial, sympy.binomial, sympy.gamma)
            if not one.free_symbols <= other.free_symbols or (one.has(sympy.factorial) and not other.has(*counting)):
                return False
            return not _differ(one, other) and _is_zero(one - other)
        # Relations to 0 are the same if they are multiples of each other; positive ones for inequalities.
        one, other = (_read(sides[0]) - _read(sides[2]) for sides in (given, wanted))
        if one.free_symbols != other.free_symbols:
            return False
        ratio = sympy.cancel(sympy.simplify(one.doit()) / sympy.simplify(other.doit()))
        if not (ratio.is_number and ratio.is_finite):
            return False
        return bool(ratio.is_positive or (wanted[1] == "=" and ratio.is_negative))
    # sympy raises almost any type of exception on hostile input.
    except Exception:
        return False


@functools.lru_cache(maxsize=256)
def _read(text: str) -> sympy.Expr:
    """Parses an expression, unevaluated, with decimals as exact fractions and `i` as the imaginary unit."""
    # A decimal must not become a float: equality is proved, and floats prove nothing.
    text = _DECIMAL.sub(_fraction, text)
    text = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
    expression = latex2sympy(text, is_real=True, normalization_config=None, conversion_config=_CONFIG)
    if not isinstance(expression, sympy.Expr) or expression.has(sympy.Float, sympy.nan, sympy.zoo, *_UNFINISHED):
        raise ValueError(f"not an exact expression: {text}")
    return expression.xreplace({sympy.Symbol("i", real=True): sympy.I})


def _fraction(match: re.Match[str]) -> str:
    """A decimal as a LaTeX fraction of the same value."""
    whole, decimals = match[1] or match[3] or "", match[2] or ""
    return rf"{{\frac{{{int(whole + decimals)}}}{{{10 ** len(decimals)}}}}}"


def _differ(answer: sympy.Expr, truth: sympy.Expr) -> bool:
    """Whether two expressions certainly have different values at one of `POINTS`."""
    symbols = sorted(truth.free_symbols, key=str)
    for point in POINTS if symbols else POINTS[:1]:
        values = {symbol: point * (2 * index + 1) / (index + 1) for index, symbol in enumerate(symbols)}
        # Where a side is not finite at this point, the comparison says nothing.
        left, right = (side.evalf(DIGITS, subs=values) for side in (answer, truth))
        if left.is_finite and right.is_finite:
            # A relative difference of 1e-50 leaves ten of the 60 digits for rounding errors of the evaluation.
            distance = abs(sympy.N(left - right, DIGITS))
            if distance > (abs(left) + abs(right)) * sympy.Float(10) ** (10 - DIGITS):
                return True
    return False


def _is_zero(difference: sympy.Expr) -> bool:
    """Whether sympy proves that the difference is zero, by increasingly expensive simplifications."""
    original = difference
    # sympy tries random points: with a fixed seed, the same question always gets the same verdict.
    seed(0)
    for simplify in (lambda d: d.doit(), sympy.expand, sympy.cancel, sympy.simplify, sympy.radsimp, sympy.trigsimp):
        difference = simplify(difference)
        if difference.is_zero:
            return True
    return difference.equals(0) is True or _is_zero_of_odd_roots(original)


def _is_zero_of_odd_roots(difference: sympy.Expr) -> bool:
    r"""Whether it is zero with the real roots of odd index, where `\sqrt[3]{x^2}` is `x^{2/3}` for negative x too."""
    roots = [power.exp for power in difference.atoms(sympy.Pow) if power.exp.is_Rational and not power.exp.is_Integer]
    if not roots or any(root.q % 2 == 0 for root in roots) or difference.has(sympy.Abs, sympy.log, sympy.I):
        return False
    # For positive symbols sympy can combine powers. Without even roots and absolute values, what holds for positive
    # numbers also holds for negative ones.
    positive = {symbol: sympy.Symbol(symbol.name, positive=True) for symbol in difference.free_symbols}
    return sympy.simplify(difference.xreplace(positive)).is_zero is True


def main(cpu_seconds: float, memory_bytes: int) -> None:
    """Answers questions until standard input closes. The kernel kills the process when a question takes too long."""
    # Verdicts get a private descriptor, because antlr prints version mismatches to standard output.
    verdicts = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    logging.disable(logging.CRITICAL)
    # Ctrl-C is for the trainer, which closes our input when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The timer below kills by SIGPROF's default action; an ignored signal would be inherited and switch the limit off.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The first parse builds tables; no answer should be charged for that.
    equal("\\frac{1}{2}", "x+1")
    print("ready", file=verdicts, flush=True)
    # RLIMIT_CPU would add up over all questions. This timer, which also counts CPU time, starts anew for each.
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        answers = [equal(*pair) for pair in json.loads(line)]
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answers), file=verdicts, flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
