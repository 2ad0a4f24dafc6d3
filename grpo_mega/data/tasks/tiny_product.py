"""Products such as `37*48=?`, which a small model cannot compute: it must learn to call a calculator.

The base model has read worked products, and now and then the transcript of a call: `[37*48]1776;`. It can copy, so it
could call and repeat the reply. The split is over unordered pairs of factors, by a separate seed: no training problem
is a held-out one with its factors exchanged. Everything random is a function of (seed, purpose, counter), so any stream
can be continued from its counter alone.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import combinations_with_replacement

from grpo_mega.data.tokenizer import CharTokenizer
from grpo_mega.errors import InputError
from grpo_mega.types import Prompt

Factors = tuple[int, int]
"""The two factors, in order."""

FACTORS = range(10, 100)
SPLIT_SEED = 20250122
"""Seed of every held-out split, independent of the run's seed."""
CALLED = 0.15
"""Share of the base documents in answer tags that call the calculator."""


def working(factors: Factors) -> str:
    """The product written out: `37*48=1776`."""
    a, b = factors
    return f"{a}*{b}={a * b}"


def call(factors: Factors) -> str:
    """A call of the calculator with its reply, as configs/environment/calculator.yaml writes it: `[37*48]1776;`."""
    a, b = factors
    return f"[{a}*{b}]{a * b};"


class TinyProduct:
    """Task of products of two numbers of two digits, with problems held out for validation and test."""

    lesson = "worked products, until it can copy them"

    def __init__(self, tokenizer: CharTokenizer, validation_size: int, test_size: int) -> None:
        """Draws the held-out problems. Raises InputError when fewer than half of all are left for training."""
        self.tokenizer = tokenizer
        available = [*combinations_with_replacement(FACTORS, 2)]
        if 2 * (validation_size + test_size) > len(available):
            raise InputError(
                f"data.validation_size + data.test_size={validation_size + test_size}",
                f"tiny_product has {len(available)} products (order aside), and half must be left for training",
                f"hold out at most {len(available) // 2}",
            )
        # The test problems are drawn first, so that the size of the validation set does not change them.
        rng = random.Random(f"{SPLIT_SEED}/held-out")
        rng.shuffle(available)
        self._held_out = set(available[: test_size + validation_size])
        drawn = [(b, a) if rng.random() < 0.5 else (a, b) for a, b in available]
        self.test = [self._prompt("test", factors) for factors in drawn[:test_size]]
        self.validation = [self._prompt("validation", f) for f in drawn[test_size : test_size + validation_size]]

    def problem(self, seed: int, k: int) -> Prompt:
        """Training problem k of a run with this seed."""
        return self._prompt("train", self._draw(random.Random(f"{seed}/problem/{k}")), f"/{k}")

    def documents(self, seed: int, step: int, n: int, tagged: float, direct: float) -> list[list[int]]:
        """The n base documents of one training step; see `base_document`."""
        return [self.base_document(random.Random(f"{seed}/document/{step}/{i}"), tagged, direct) for i in range(n)]

    def base_document(self, rng: random.Random, tagged: float, direct: float) -> list[int]:
        """Tokens of one document for the base model: prompt, solution, `<eos>`.

        A share `tagged` is in the answer format, `CALLED` of them with a call; of the rest a share `direct` is the bare
        answer, the others write the product out first.
        """
        factors = self._draw(rng)
        answer = factors[0] * factors[1]
        if rng.random() < tagged:
            thoughts = call(factors) if rng.random() < CALLED else working(factors)
            solution = f"<think>{thoughts}</think><answer>{answer}</answer>"
        elif rng.random() < direct:
            solution = str(answer)
        else:
            solution = f"{working(factors)};{answer}"
        return self.tokenizer.encode(f"{_question(factors)}{solution}<eos>")

    def longest_document(self) -> int:
        """Number of tokens of the longest possible base document."""
        factors = (FACTORS[-1], FACTORS[-1])
        text = f"{_question(factors)}<think>{call(factors)}</think><answer>{factors[0] * factors[1]}</answer><eos>"
        return len(self.tokenizer.encode(text))

    def working_prompt(self, prompt: Prompt) -> Prompt:
        """The prompt followed by the first `37*` of untagged working, for the competence gate's continuation."""
        text = f"{prompt.text}{prompt.text.removeprefix('<bos>').partition('*')[0]}*"
        return replace(prompt, id=f"{prompt.id}/working", text=text, token_ids=tuple(self.tokenizer.encode(text)))

    def is_worked_out(self, prompt: Prompt, text: str) -> bool:
        """Whether the continuation of a `working_prompt` copies the second factor, and a value as the answer.

        The value may be wrong, since the model cannot compute it.
        """
        second = str(prompt.asked).partition("*")[2].removesuffix("=?")
        return re.fullmatch(rf"{second}=([0-9]+);\1", text) is not None

    def _draw(self, rng: random.Random) -> Factors:
        """A problem that is not held out, uniformly."""
        # Ends soon, as at least half of all products are left for training.
        while True:
            a, b = rng.choice(FACTORS), rng.choice(FACTORS)
            if (min(a, b), max(a, b)) not in self._held_out:
                return a, b

    def _prompt(self, split: str, factors: Factors, suffix: str = "") -> Prompt:
        a, b = factors
        text = _question(factors)
        return Prompt(
            id=f"tiny_product/{split}/{a}*{b}{suffix}",
            token_ids=tuple(self.tokenizer.encode(text)),
            text=text,
            answer=str(a * b),
            task="tiny_product",
            asked=text.removeprefix("<bos>"),
        )


def _question(factors: Factors) -> str:
    a, b = factors
    return f"<bos>{a}*{b}=?"
