"""Chain sums such as `3+5+2+9=?`: a task with a skill (adding), a format (answer tags) and a use for thinking.

Training, validation and test share no problem, permutations of the same digits included: the split is made over
multisets of digits, by a separate seed, so that every run is measured on the same test problems. Everything random
is a function of (seed, purpose, counter), so any stream can be continued from its counter alone.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from grpo_mega.data.tokenizer import CharTokenizer
from grpo_mega.errors import InputError
from grpo_mega.judges.numerals import in_digits, in_words
from grpo_mega.types import Prompt

Terms = tuple[int, ...]
"""The digits of one sum, in order."""
Demonstration = tuple[list[int], list[int]]
"""Token ids of a prompt and of its completion."""

SPLIT_SEED = 20250120
"""Seed of every held-out split, independent of the run's seed."""
_WORKING = re.compile(r"(?:^|=)([0-9]+)\Z")


@dataclass(frozen=True)
class Styles:
    """Probabilities of the styles of a worked solution: all terms at once, two terms per step, one term per step."""

    whole: float
    two: float
    one: float

    def draw(self, rng: random.Random, terms: Terms) -> int:
        """Number of terms to add per step, drawn at random."""
        return rng.choices((len(terms), 2, 1), (self.whole, self.two, self.one))[0]


BASE_TAGGED = Styles(whole=0.5, two=0.3, one=0.2)
BASE_WORKING = Styles(whole=0.0, two=0.15, one=0.85)
SFT_TAGGED = Styles(whole=0.4, two=0.3, one=0.3)


def multisets(terms: int) -> int:
    """Number of multisets of `terms` digits."""
    return math.comb(terms + 9, 9)


def working(terms: Terms, stride: int) -> str:
    """The running sum, `stride` terms per step: `3+5=8;8+2=10` for (3, 5, 2) and stride 1."""
    total, steps = terms[0], []
    for i in range(1, len(terms), stride):
        merged = terms[i : i + stride]
        steps.append(f"{_expression((total, *merged))}={total + sum(merged)}")
        total += sum(merged)
    return ";".join(steps)


def working_answer(text: str) -> str | None:
    """The number that the continuation of a `working_prompt` ends with; None unless it ends in `=number`."""
    # The continuation of a sum of two terms is the number alone: its `=` is in the prompt.
    match = _WORKING.search(text)
    return match.group(1) if match else None


class ChainSum:
    """Task of sums of `min_terms` to `max_terms` digits, with problems held out for validation and test."""

    lesson = "worked arithmetic, until it can calculate"

    def __init__(
        self,
        tokenizer: CharTokenizer,
        min_terms: int,
        max_terms: int,
        validation_size: int,
        test_size: int,
        languages: Sequence[str] = (),
    ) -> None:
        """Draws the held-out problems; 2 <= min_terms <= max_terms. Raises InputError when the sizes are impossible.

        Working uses number words of `languages` (see `numerals.py`), or digits; problems and answers use digits.
        """
        self.tokenizer = tokenizer
        self.languages = tuple(languages)
        self.lengths = range(min_terms, max_terms + 1)
        self._check_sizes(validation_size, test_size)
        # The test problems are drawn first, so that the size of the validation set does not change them.
        test = _held_out("test", test_size, self.lengths, exclude=())
        validation = _held_out("validation", validation_size, self.lengths, exclude={_multiset(t) for t in test})
        self.test = [self._prompt("test", terms) for terms in test]
        self.validation = [self._prompt("validation", terms) for terms in validation]
        self._held_out = {_multiset(terms) for terms in test + validation}

    def problem(self, seed: int, k: int) -> Prompt:
        """Training problem k of a run with this seed."""
        return self._prompt("train", self._draw(random.Random(f"{seed}/problem/{k}")), f"/{k}")

    def base_document(self, rng: random.Random, tagged: float, direct: float) -> list[int]:
        """Tokens of one document for the base model: prompt, solution, `<eos>`.

        A share `tagged` is in the answer format; of the rest a share `direct` is the bare answer, the others are
        untagged working.
        """
        terms = self._draw(rng)
        if rng.random() < tagged:
            solution = _tagged(terms, BASE_TAGGED.draw(rng, terms), self.languages, rng)
        elif rng.random() < direct:
            solution = f"{sum(terms)}<eos>"
        else:
            solution = in_words(working(terms, BASE_WORKING.draw(rng, terms)), self.languages, rng) + "<eos>"
        return self.tokenizer.encode(_question(terms) + solution)

    def documents(self, seed: int, step: int, n: int, tagged: float, direct: float) -> list[list[int]]:
        """The n base documents of one training step."""
        return [self.base_document(random.Random(f"{seed}/document/{step}/{i}"), tagged, direct) for i in range(n)]

    def longest_document(self) -> int:
        """Number of tokens of the longest possible base document or demonstration."""
        terms = (9,) * self.lengths[-1]
        return len(self.tokenizer.encode(_question(terms) + _tagged(terms, 1, (), random.Random())))

    def sft_trace(self, rng: random.Random) -> Demonstration:
        """One demonstration in the answer format, of mixed quality, in the first of the languages."""
        terms = self._draw(rng)
        solution = _tagged(terms, SFT_TAGGED.draw(rng, terms), self.languages[:1], rng)
        return self.tokenizer.encode(_question(terms)), self.tokenizer.encode(solution)

    def sft_traces(self, seed: int, step: int, n: int) -> list[Demonstration]:
        """The n demonstrations of one supervised step."""
        return [self.sft_trace(random.Random(f"{seed}/sft/{step}/{i}")) for i in range(n)]

    def working_prompt(self, prompt: Prompt) -> Prompt:
        """The prompt followed by the first `a+b=` of untagged working, for the competence gate's continuation.

        The working is in the first of the languages.
        """
        first_two = "+".join(prompt.text.removeprefix("<bos>").removesuffix("=?").split("+")[:2])
        text = f"{prompt.text}{in_words(first_two, self.languages[:1], random.Random())}="
        return replace(prompt, id=f"{prompt.id}/working", text=text, token_ids=tuple(self.tokenizer.encode(text)))

    def is_worked_out(self, prompt: Prompt, text: str) -> bool:
        """Whether the continuation of a `working_prompt` ends with the right number."""
        return working_answer(in_digits(text)) == prompt.answer

    def _draw(self, rng: random.Random) -> Terms:
        """A problem that is not held out: first its length is drawn uniformly, then each digit."""
        # Ends soon, as `_check_sizes` leaves at least half of all problems for training.
        while True:
            terms = tuple(rng.randrange(10) for _ in range(rng.choice(self.lengths)))
            if _multiset(terms) not in self._held_out:
                return terms

    def _prompt(self, split: str, terms: Terms, suffix: str = "") -> Prompt:
        text = _question(terms)
        return Prompt(
            id=f"chain_sum/{split}/{_expression(terms)}{suffix}",
            token_ids=tuple(self.tokenizer.encode(text)),
            text=text,
            answer=str(sum(terms)),
            task="chain_sum",
            asked=text.removeprefix("<bos>"),
        )

    def _check_sizes(self, validation_size: int, test_size: int) -> None:
        for field, size in (("validation_size", validation_size), ("test_size", test_size)):
            if size < len(self.lengths):
                raise InputError(
                    f"data.{field}={size}",
                    f"fewer than the lengths of sums, {self.lengths[0]} to {self.lengths[-1]} terms",
                    f"choose at least {len(self.lengths)}, one problem of every length",
                )
        available = sum(map(multisets, self.lengths))
        if 2 * (validation_size + test_size) > available:
            raise InputError(
                f"data.validation_size + data.test_size={validation_size + test_size}",
                f"only {available} sums of {self.lengths[0]} to {self.lengths[-1]} digits exist (order aside), and "
                "half must be left for training",
                f"hold out at most {available // 2}, or raise data.max_terms",
            )


def _expression(terms: Terms) -> str:
    return "+".join(map(str, terms))


def _question(terms: Terms) -> str:
    return f"<bos>{_expression(terms)}=?"


def _tagged(terms: Terms, stride: int, languages: Sequence[str], rng: random.Random) -> str:
    thought = in_words(working(terms, stride), languages, rng)
    return f"<think>{thought}</think><answer>{sum(terms)}</answer><eos>"


def _multiset(terms: Terms) -> Terms:
    return tuple(sorted(terms))


def _held_out(split: str, size: int, lengths: range, exclude: Collection[Terms]) -> list[Terms]:
    """`size` problems with different multisets of digits, none of them in `exclude`, in a mixed order."""
    rng = random.Random(f"{SPLIT_SEED}/{split}")
    # Each length gets seats in proportion to its number of multisets, and at least one (Adams's method): one seat after
    # the other goes to the length with the most problems for each seat that it has.
    seats = dict.fromkeys(lengths, 1)
    for _ in range(size - len(lengths)):
        seats[max(lengths, key=lambda n: multisets(n) / seats[n])] += 1
    problems: list[Terms] = []
    for length, of_length in seats.items():
        chosen: set[Terms] = set()
        while len(chosen) < of_length:
            # Stars and bars: every choice of `length` places out of `length + 9` is another multiset of digits.
            stars = sorted(rng.sample(range(length + 9), length))
            digits = tuple(star - i for i, star in enumerate(stars))
            if digits not in exclude and digits not in chosen:
                chosen.add(digits)
                problems.append(tuple(rng.sample(digits, length)))
    # Drawn by length, the problems are shuffled so that any first part of them mixes lengths.
    rng.shuffle(problems)
    return problems
