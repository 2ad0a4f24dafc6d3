"""A number from 0 to 31 that is to be guessed in five turns, each of which is told whether it is higher or lower.

All problems read alike: only the environment knows the number. The base model has read games of players who guess at
random, and now and then one of a player who halves what is left. With 32 problems none is held out: what is measured is
the strategy. Everything random is a function of (seed, purpose, counter), so any stream can be continued from its
counter alone.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace

from grpo_mega.data.tokenizer import CharTokenizer
from grpo_mega.types import Prompt

NUMBERS = range(32)
GUESSES = 5
"""Turns of a game; halving what is left finds 31 of the 32 numbers."""
QUESTION = "<bos>?"
HALVING = 0.1
"""Share of the base documents in which a player halves what is left."""


def turn(guess: int, number: int) -> str:
    """A guess with its reply, as configs/environment/guess.yaml writes it: `[16]+;` for a higher number."""
    return f"[{guess}]{'=' if guess == number else '+' if guess < number else '-'};"


class TinyGuess:
    """Task of guessing a number; each of them is as often in the held-out problems as any other."""

    lesson = "games of numbers to guess, until it can write one"

    def __init__(self, tokenizer: CharTokenizer, validation_size: int, test_size: int) -> None:
        """Makes the problems of evaluations."""
        self.tokenizer = tokenizer
        self.validation = [self._prompt("validation", k % len(NUMBERS), k) for k in range(validation_size)]
        self.test = [self._prompt("test", k % len(NUMBERS), k) for k in range(test_size)]

    def problem(self, seed: int, k: int) -> Prompt:
        """Training problem k of a run with this seed."""
        return self._prompt("train", random.Random(f"{seed}/problem/{k}").choice(NUMBERS), k)

    def documents(self, seed: int, step: int, n: int, tagged: float, direct: float) -> list[list[int]]:
        """The n base documents of one training step; a game has no answer format, so the shares have no meaning."""
        return [self.base_document(random.Random(f"{seed}/document/{step}/{i}")) for i in range(n)]

    def base_document(self, rng: random.Random) -> list[int]:
        """Tokens of one document for the base model: a game with its replies, `<eos>`."""
        number, game, halves = rng.choice(NUMBERS), QUESTION, rng.random() < HALVING
        left = NUMBERS
        for _ in range(GUESSES):
            guess = left[len(left) // 2] if halves else rng.choice(NUMBERS)
            game += turn(guess, number)
            if guess == number:
                break
            left = range(guess + 1, left.stop) if guess < number else range(left.start, guess)
        return self.tokenizer.encode(f"{game}<eos>")

    def longest_document(self) -> int:
        """Number of tokens of the longest possible base document."""
        return len(self.tokenizer.encode(QUESTION + turn(NUMBERS[-1], 0) * GUESSES + "<eos>"))

    def working_prompt(self, prompt: Prompt) -> Prompt:
        """The prompt followed by a guess and its reply, for the competence gate's continuation."""
        text = QUESTION + turn(NUMBERS[-1] - int(prompt.answer), int(prompt.answer))
        return replace(prompt, id=f"{prompt.id}/working", text=text, token_ids=tuple(self.tokenizer.encode(text)))

    def is_worked_out(self, prompt: Prompt, text: str) -> bool:
        """Whether the continuation of a `working_prompt` has the form of a game."""
        return re.fullmatch(r"(\[[0-9]{1,2}\][-+=];){0,4}", text) is not None

    def _prompt(self, split: str, number: int, k: int) -> Prompt:
        return Prompt(
            id=f"tiny_guess/{split}/{number}/{k}",
            token_ids=tuple(self.tokenizer.encode(QUESTION)),
            text=QUESTION,
            answer=str(number),
            task="tiny_guess",
            asked=QUESTION.removeprefix("<bos>"),
        )
