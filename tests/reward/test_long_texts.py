"""No text of a policy keeps a rank busy: all that reads completions takes time that is linear in their length."""

from __future__ import annotations

import multiprocessing
from array import array
from collections.abc import Callable, Iterator
from itertools import product

import pytest
from limits import limit

from grpo_mega.config.rules.reward import read_options
from grpo_mega.config.schema.terms import JudgeOptions
from grpo_mega.judges.math.parse import parse
from grpo_mega.judges.math.verify import _well_formed
from grpo_mega.reward.code import program
from grpo_mega.reward.judge import question, verdict_in
from grpo_mega.reward.kinds import FORMULAS
from grpo_mega.types import Prompt, Sample

CHARACTERS = 30_000
"""Of a text: with cubic time one takes hours, with quadratic time all take minutes, with linear time seconds."""
ANSWER_CHARACTERS = 990
"""Of an answer that is still read as mathematics; with cubic time one takes half a minute."""
SIGNS = (
    *" \n\t\\{}()[]<>*$`~_^#.,:;=+-/%&|!'\"0aA\u2212\u4e00\u0301",
    *(
        "\r\n",
        "` ",
        "~ ",
        " a",
        "\n ",
        "1,",
        ",234",
        "1 ",
        "1/",
        "<a",
        "\\text{",
        "\\boxed{",
        "\\frac{",
        "\\over",
        "{1",
    ),
    *("<think>", "<answer>", "</answer>", "answer ", "answer\n", "answer is ", "Score: ", "```\n", "~~~\n", "sqrt("),
    *(" and ", " or ", "\\pm", "\\begin{array}", "a:", "\\left(", "of ", "per ", "1 to ", "\\text{a}", "{}", "()"),
)
PREFIXES = (
    *("", "The answer", "The answer is", "The answer should", "answer:", "Score:", "\\boxed{", "\\text{", "<think>"),
    *("<think>a</think><answer>", "```python\n", "```", "~~~", "<answer>", "1", "-", "$", "(A", "A", "x = ", "5 ", "{"),
)
SUFFIXES = ("`",)

FEW = 8
"""Of so many texts `make test` tries one, in which every prefix and every sign is there several times."""
SHARES = [FEW, pytest.param(1, marks=pytest.mark.long)]


def texts(characters: int, one_of: int) -> Iterator[str]:
    """Every prefix, sign and suffix, the sign as often as fits; `one_of` so many."""
    for (i, prefix), (j, sign), suffix in product(enumerate(PREFIXES), enumerate(SIGNS), SUFFIXES):
        if (i + j) % one_of == 0:
            yield prefix + sign * ((characters - len(prefix) - len(suffix)) // len(sign)) + suffix


def ends(function: Callable[..., None], *arguments: object) -> None:
    """Calls a function in a process of its own; what takes quadratic time does not end within the limit."""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    process.join(limit(100))
    late = process.is_alive()
    process.kill()
    process.join()
    assert (late, process.exitcode) == (False, 0)


def score(kind: str, options: dict[str, object], truth: str, one_of: int) -> None:
    """Scores every text as a completion."""
    metadata = {"choices": ["Rome", "Paris"]} if kind == "multiple_choice" else {}
    prompt = Prompt("p/1", (1,), "?", truth, "t", metadata)
    for text in texts(CHARACTERS, one_of):
        sample = Sample(prompt, 0, array("i"), array("f"), "stop", ((0, 0),), text)
        if kind == "code":
            program(text)
        elif kind == "judge":
            question("{completion}", sample)
            verdict_in(f"{text}\nScore: 3", JudgeOptions("http://x", "m", "{completion}"), sample)
        else:
            FORMULAS[kind](sample, read_options(kind, options))


def read(one_of: int) -> None:
    """Reads every text as an answer."""
    for text in texts(ANSWER_CHARACTERS, one_of):
        if _well_formed(text):
            parse(text)


@pytest.mark.parametrize("one_of", SHARES)
@pytest.mark.parametrize(
    ("kind", "options", "truth"),
    [
        ("accuracy", {}, "8"),
        ("boxed", {}, "8"),
        ("format", {"template": "think_answer"}, "8"),
        ("format", {"template": "boxed"}, "8"),
        ("last_number", {}, "8"),
        ("multiple_choice", {"read": "text"}, "B"),
        ("exact", {"ignore_case": True}, "8"),
        ("language", {"script": "latin"}, "8"),
        ("code", {}, "8"),
        ("judge", {}, "8"),
    ],
)
def test_long_completions_take_linear_time(kind: str, options: dict[str, object], truth: str, one_of: int) -> None:
    ends(score, kind, options, truth, one_of)


@pytest.mark.parametrize("one_of", SHARES)
def test_answers_of_the_greatest_length_are_read_at_once(one_of: int) -> None:
    ends(read, one_of)


def test_few_texts_have_every_prefix_and_every_sign() -> None:
    few = [pair for pair in product(range(len(PREFIXES)), range(len(SIGNS))) if sum(pair) % FEW == 0]
    assert {i for i, _ in few} == {*range(len(PREFIXES))}
    assert {j for _, j in few} == {*range(len(SIGNS))}
    assert len(few) == len([*texts(2, FEW)]) < len([*texts(2, 1)]) / (FEW - 1)
