"""Countdown, the task of TinyZero (Pan et al., 2025): an expression of given numbers that has a given value."""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from fractions import Fraction

from grpo_mega.config.schema.terms import ReadOptions
from grpo_mega.errors import InputError
from grpo_mega.reward.extract import final_answer
from grpo_mega.reward.verdict import Verdict
from grpo_mega.types import Prompt, Sample

NUMBERS = "nums"
"""Key of a prompt's metadata for the given numbers, a list of integers."""
LONGEST = 200
"""Longest expression read, in characters."""
_WRITTEN = re.compile(r"[0-9+\-*/() ]+")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def countdown(sample: Sample, options: ReadOptions) -> Verdict:
    """1.0 when the answer is an expression that uses every given number once and has the ground truth as exact value.

    Allowed are +, -, *, / and parentheses.

    Raises:
        InputError: The problem has no numbers, or its answer is not a number.
    """
    numbers, target = numbers_and_target(sample.prompt)
    answer = (final_answer(sample, options.read, options.strict) or "").strip()
    if not answer:
        return Verdict(0.0, "no answer")
    expression = _parsed(answer)
    if expression is None:
        return Verdict(0.0, f"not an expression of whole numbers, + - * / and parentheses: {answer[:LONGEST]!r}")
    used = [_number(node) for node in ast.walk(expression) if isinstance(node, ast.Constant)]
    if Counter(used) != Counter(numbers):
        return Verdict(0.0, f"it uses {sorted(used)}, not each of {sorted(numbers)} once")
    try:
        value = _value(expression)
    except ZeroDivisionError:
        return Verdict(0.0, "it divides by 0")
    return Verdict(1.0) if value == target else Verdict(0.0, f"it is {value}, not {target}")


def numbers_and_target(prompt: Prompt) -> tuple[list[int], int]:
    """Numbers and target value of a problem. Raises InputError when it has none."""
    numbers = prompt.metadata.get(NUMBERS)
    # `type(...) is int`, as a bool is an instance of int.
    if not isinstance(numbers, list) or not numbers or not all(type(number) is int for number in numbers):
        fix = "write them in a column that data.sources.NAME.metadata names"
        raise InputError(f"metadata[{NUMBERS!r}]={numbers!r}", "not a list of whole numbers", fix)
    if not re.fullmatch(r"-?[0-9]{1,18}", prompt.answer):
        raise InputError(f"the answer {prompt.answer!r}", "not a whole number", "write the value to be reached")
    return numbers, int(prompt.answer)


def _parsed(text: str) -> ast.expr | None:
    """Syntax tree of an expression; None when it has forbidden characters, or is longer than `LONGEST`."""
    # The allowed characters rule out names and attributes before Python's parser sees the untrusted text.
    if len(text) > LONGEST or not _WRITTEN.fullmatch(text):
        return None
    try:
        parsed = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        return None
    # The allowed characters also spell powers, floor division, calls as in 3(4), empty tuples, and `...`.
    allowed = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.USub, ast.UAdd, *_OPERATORS)
    nodes = [*ast.walk(parsed)]
    whole = all(type(node.value) is int for node in nodes if isinstance(node, ast.Constant))
    return parsed if whole and all(isinstance(node, allowed) for node in nodes) else None


def _value(node: ast.expr) -> Fraction:
    """Exact value of an expression. Raises ZeroDivisionError."""
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp):
        inner = _value(node.operand)
        return -inner if isinstance(node.op, ast.USub) else inner
    # Exact, as floats would refuse right answers such as 8/(3-8/3), which is 24.
    return Fraction(_number(node))


def _number(node: ast.expr) -> int:
    assert isinstance(node, ast.Constant)
    assert isinstance(node.value, int)
    return node.value
