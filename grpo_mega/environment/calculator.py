"""A calculator: an environment of one function, and an example of how to write one."""

import re
from math import prod

LONGEST = 100
"""Characters of an expression: without powers, its value has no more digits than that."""
_EXPRESSION = re.compile("[0-9]+(?: *[-+*] *[0-9]+)*")


def calculate(expression: str) -> str:
    """Calculates with whole numbers.

    Args:
        expression: Numbers with +, - and * between them, such as 37*48.
    """
    # Not `eval`: the text is a model's.
    if len(expression) > LONGEST or not _EXPRESSION.fullmatch(expression):
        raise ValueError("write whole numbers with +, - and * between them")
    terms = expression.replace("-", "+-").replace(" ", "").split("+")
    return str(sum(prod(map(int, term.split("*"))) for term in terms))
