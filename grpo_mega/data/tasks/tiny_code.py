"""Tiny programs: given three values of a function, write a Python function that computes it.

A problem such as `f(0,0)=4;f(1,0)=6;f(0,1)=9?` has the answer `def f(x,y):return 2*x+5*y+4`. Completions are judged by
hidden tests, which are other values of the function. The split is over (unordered slopes, value at the origin), by a
separate seed: no training problem is a held-out one with x and y exchanged. Everything random is a function of (seed,
purpose, counter), so any stream can be continued from its counter alone.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations_with_replacement
from typing import Any

from grpo_mega.data.tokenizer import CharTokenizer
from grpo_mega.errors import InputError
from grpo_mega.types import Prompt

Coefficients = tuple[int, int, int]
"""(a, b, c) of the function a x + b y + c."""
Kin = tuple[int, int, int]
"""Coefficients up to exchanging x and y, the key of the split."""

SLOPES = range(1, 10)
ORIGINS = range(20)
"""Possible values of the function at x = y = 0."""
SPLIT_SEED = 20250121
"""Seed of every held-out split, independent of the run's seed."""
TESTS = 2
"""Number of hidden tests of a problem: of all functions of the task, only the right one passes them."""
TAGGED_WORKING = {0: 0.5, 1: 0.3, 2: 0.2}
"""Number of slopes that a base document in answer tags works out before it answers -> probability."""


def program(function: Coefficients) -> str:
    """Reference answer: the source of the function."""
    a, b, c = function
    return f"def f(x,y):return {a}*x+{b}*y+{c}"


def working(function: Coefficients) -> list[str]:
    """Derivation of each slope from the given values: `6-4=2` and `9-4=5` for 2 x + 5 y + 4."""
    a, b, c = function
    return [f"{slope + c}-{c}={slope}" for slope in (a, b)]


def hidden_tests(function: Coefficients) -> list[dict[str, Any]]:
    """Tests of a problem, the same in every call, in the format of `Prompt.metadata["tests"]`."""
    a, b, c = function
    rng = random.Random(f"{SPLIT_SEED}/tests/{a}/{b}/{c}")
    # y is above any difference of two values at the origin, x above what y times a difference of slopes adds to that:
    # no other function of the task has the same value at a single point.
    points = [(rng.randrange(1000, 10000), rng.randrange(20, 100)) for _ in range(TESTS)]
    return [{"call": "f", "args": [x, y], "returns": a * x + b * y + c} for x, y in points]


class TinyCode:
    """Task of tiny programs, with problems held out for validation and test."""

    lesson = "worked programs, until it can write them"

    def __init__(self, tokenizer: CharTokenizer, validation_size: int, test_size: int) -> None:
        """Draws the held-out problems. Raises InputError when fewer than half of all are left for training."""
        self.tokenizer = tokenizer
        available = [(a, b, c) for a, b in combinations_with_replacement(SLOPES, 2) for c in ORIGINS]
        if 2 * (validation_size + test_size) > len(available):
            raise InputError(
                f"data.validation_size + data.test_size={validation_size + test_size}",
                f"tiny_code has {len(available)} functions (order of x and y aside), and half must be left for "
                "training",
                f"hold out at most {len(available) // 2}",
            )
        # The test problems are drawn first, so that the size of the validation set does not change them.
        rng = random.Random(f"{SPLIT_SEED}/held-out")
        rng.shuffle(available)
        self._held_out: set[Kin] = set(available[: test_size + validation_size])
        drawn = [(b, a, c) if rng.random() < 0.5 else (a, b, c) for a, b, c in available]
        self.test = [self._prompt("test", function) for function in drawn[:test_size]]
        self.validation = [self._prompt("validation", f) for f in drawn[test_size : test_size + validation_size]]

    def problem(self, seed: int, k: int) -> Prompt:
        """Training problem k of a run with this seed."""
        return self._prompt("train", self._draw(random.Random(f"{seed}/problem/{k}")), f"/{k}")

    def documents(self, seed: int, step: int, n: int, tagged: float, direct: float) -> list[list[int]]:
        """The n base documents of one training step; see `base_document`."""
        return [self.base_document(random.Random(f"{seed}/document/{step}/{i}"), tagged, direct) for i in range(n)]

    def base_document(self, rng: random.Random, tagged: float, direct: float) -> list[int]:
        """Tokens of one document for the base model: prompt, solution, `<eos>`.

        A share `tagged` has its program in answer tags, after thoughts of mixed quality; of the rest a share `direct`
        is the program alone, and the others derive both slopes first.
        """
        function = self._draw(rng)
        if rng.random() < tagged:
            (worked,) = rng.choices([*TAGGED_WORKING], [*TAGGED_WORKING.values()])
            solution = _tagged(function, worked)
        elif rng.random() < direct:
            solution = program(function)
        else:
            solution = ";".join([*working(function), program(function)])
        return self.tokenizer.encode(f"{_question(function)}{solution}<eos>")

    def longest_document(self) -> int:
        """Number of tokens of the longest possible base document."""
        function = (SLOPES[-1], SLOPES[-1], ORIGINS[-1])
        return len(self.tokenizer.encode(f"{_question(function)}{_tagged(function, 2)}<eos>"))

    def working_prompt(self, prompt: Prompt) -> Prompt:
        """The prompt followed by the first `6-4=` of untagged working, for the competence gate's continuation."""
        origin, first = (value.partition("=")[2] for value in prompt.text.split(";")[:2])
        text = f"{prompt.text}{first}-{origin}="
        return replace(prompt, id=f"{prompt.id}/working", text=text, token_ids=tuple(self.tokenizer.encode(text)))

    def is_worked_out(self, prompt: Prompt, text: str) -> bool:
        """Whether the continuation of a `working_prompt` ends with the reference program."""
        return text.rpartition(";")[2] == prompt.answer

    def _draw(self, rng: random.Random) -> Coefficients:
        """A problem that is not held out, uniformly."""
        # Ends soon, as at least half of all functions are left for training.
        while True:
            a, b, c = rng.choice(SLOPES), rng.choice(SLOPES), rng.choice(ORIGINS)
            if (min(a, b), max(a, b), c) not in self._held_out:
                return a, b, c

    def _prompt(self, split: str, function: Coefficients, suffix: str = "") -> Prompt:
        text = _question(function)
        return Prompt(
            id=f"tiny_code/{split}/{','.join(map(str, function))}{suffix}",
            token_ids=tuple(self.tokenizer.encode(text)),
            text=text,
            answer=program(function),
            task="tiny_code",
            metadata={"tests": hidden_tests(function)},
            asked=text.removeprefix("<bos>"),
        )


def _question(function: Coefficients) -> str:
    a, b, c = function
    return f"<bos>f(0,0)={c};f(1,0)={a + c};f(0,1)={b + c}?"


def _tagged(function: Coefficients, worked: int) -> str:
    thoughts = f"<think>{';'.join(working(function)[:worked])}</think>" if worked else ""
    return f"{thoughts}<answer>{program(function)}</answer>"
