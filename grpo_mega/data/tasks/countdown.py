"""Problems of Countdown, TinyZero's task (Pan et al., 2025): an expression of given numbers with a given value.

As in TinyZero's data set there are three or four numbers from 1 to 99, and values from 10 to 99. Each problem is
generated from an expression that uses every number once, so it has a solution.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

NUMBERS = range(1, 100)
COUNTS = (3, 4)
TARGETS = range(10, 100)
PROMPT = (
    "Using the numbers {numbers}, create an equation that equals {target}. You can use basic arithmetic operations "
    "(+, -, *, /) and each number can only be used once. Give the expression alone as the answer, for example "
    "(1 + 2) / 3."
)
Key = tuple[tuple[int, ...], int]
"""(sorted numbers, value): identifies a problem."""


def problems(seed: int) -> Iterator[dict[str, Any]]:
    """Yields distinct problems without end: rows with the columns prompt, answer and nums."""
    rng, seen = random.Random(f"countdown/{seed}"), set[Key]()
    while True:
        numbers = [rng.choice(NUMBERS) for _ in range(rng.choice(COUNTS))]
        # The value of a random expression that uses every number once; a division by 0 becomes a sum.
        left = [Fraction(number) for number in numbers]
        while len(left) > 1:
            rng.shuffle(left)
            a, b = left.pop(), left.pop()
            left.append(rng.choice([a + b, a - b, a * b, a / b if b else a + b]))
        (value,) = left
        if value.denominator != 1 or int(value) not in TARGETS or key(numbers, int(value)) in seen:
            continue
        seen.add(key(numbers, int(value)))
        prompt = PROMPT.format(numbers=numbers, target=int(value))
        yield {"prompt": prompt, "answer": int(value), "nums": numbers}


def key(numbers: list[int], target: int) -> Key:
    """Identity of a problem: its sorted numbers and its value."""
    return tuple(sorted(numbers)), target
