"""A calculator: an environment of one function, and an agent that has the same in its own loop; examples of how to
write either."""

import json
import re
from math import prod
from urllib.request import Request, urlopen

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


def agent(base_url: str, prompt: str, **row: object) -> None:
    """Asks the policy for the solution of a problem, and calculates for it what it writes after a bracket."""
    messages = [{"role": "user", "content": prompt}]
    while True:
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        with urlopen(Request(f"{base_url}/chat/completions", body)) as response:
            said = json.load(response)["choices"][0]["message"]
        _, called, expression = said["content"].rpartition("[")
        if not called:
            return
        try:
            value = calculate(expression)
        except ValueError as error:
            value = f"error: {error}"
        messages += [said, {"role": "user", "content": f"{value};"}]
