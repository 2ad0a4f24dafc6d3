"""Steps of worked sums: which are right, where they end, and tricks that earn nothing."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.config.schema import RewardTerm
from grpo_mega.config.schema.terms import NoOptions
from grpo_mega.data.tasks.chain_sum import working
from grpo_mega.judges.numerals import in_words
from grpo_mega.reward.scorable import check_problems
from grpo_mega.reward.steps import sum_steps
from grpo_mega.types import Prompt, Sample

TERMS = st.lists(st.integers(0, 9), min_size=2, max_size=6).map(tuple)


def sample(terms: tuple[int, ...], text: str) -> Sample:
    question = "+".join(map(str, terms))
    prompt = Prompt("p", (), f"<bos>{question}=?", str(sum(terms)), "chain_sum")
    return Sample(prompt, 0, array("i"), array("f"), "stop", ((0, 0),), text)


def rewards(terms: tuple[int, ...], thought: str) -> list[float]:
    return [reward for _, reward in sum_steps(sample(terms, f"<think>{thought}</think>"), NoOptions()).steps]


@given(terms=TERMS, stride=st.integers(1, 6))
def test_right_working_earns_every_step_and_each_ends_with_its_result(terms: tuple[int, ...], stride: int) -> None:
    worked = working(terms, stride)
    text = f"<think>{worked}</think><answer>{sum(terms)}</answer>"
    verdict = sum_steps(sample(terms, text), NoOptions())
    assert verdict.value == 1.0
    ends = [end for end, _ in verdict.steps]
    assert [text[:end].removeprefix("<think>").split(";")[-1] for end in ends] == worked.split(";")
    assert {reward for _, reward in verdict.steps} == {1.0}


@given(terms=TERMS, stride=st.integers(1, 6), seed=st.integers())
def test_number_words_earn_what_the_digits_earn_and_steps_end_where_they_are_written(
    terms: tuple[int, ...], stride: int, seed: int
) -> None:
    worked = in_words(working(terms, stride), ["english", "chinese"], random.Random(seed))
    text = f"<think>{worked}</think><answer>{sum(terms)}</answer>"
    verdict = sum_steps(sample(terms, text), NoOptions())
    assert verdict.value == 1.0
    assert [text[:end].removeprefix("<think>").split(";")[-1] for end, _ in verdict.steps] == worked.split(";")


@pytest.mark.parametrize(
    ("thought", "expected"),
    [
        ("3+5=8;8+2=10;10+9=19", [1, 1, 1]),
        ("3+5=9;9+2=11;11+9=20", [0, 0, 0]),  # each goes on from what is wrong
        ("3+5=9;8+2=10;10+9=19", [0, 1, 1]),
        ("3+5=8;8+2=11;10+9=19", [1, 0, 1]),
        ("3+5+2=10;10+9=19", [1, 1]),
        ("3+5=8;3+5=8;3+5=8;3+5=8", [1, 0, 0, 0]),  # repeated
        ("0+0=0;3+5=8", [0, 0]),  # the first has taken the place of the second
        ("3+5=8;8+2=10;10+9=19;19+0=19", [1, 1, 1, 0]),
        ("3+5+2+9+0=19", [0]),
        ("3=3;3+5=8", [0, 1]),
        ("3+2=5;5+5=10", [0, 0]),
        ("3+5=8;8+2", [1, 0]),
        (";;", [0, 0, 0]),
        ("a3+5=8", [0]),
        ("03+5=8", [0]),
        ("", []),
    ],
)
def test_a_step_adds_the_next_terms_to_what_the_terms_before_add_up_to(thought: str, expected: list[float]) -> None:
    assert rewards((3, 5, 2, 9), thought) == expected


@given(terms=TERMS, thought=st.text("0123456789+=;", max_size=200), seed=st.integers(0, 99))
def test_no_text_has_more_right_steps_than_there_are_terms_to_add(
    terms: tuple[int, ...], thought: str, seed: int
) -> None:
    parts = [*working(terms, 1).split(";"), *thought.split(";")]
    random.Random(seed).shuffle(parts)
    assert sum(rewards(terms, ";".join(parts))) <= len(terms) - 1


@pytest.mark.parametrize("text", ["3+5=8;8+2=10", " <think>3+5=8</think>", "</think><think>3+5=8", ""])
def test_what_does_not_open_with_a_thought_has_no_steps(text: str) -> None:
    verdict = sum_steps(sample((3, 5, 2), text), NoOptions())
    assert (verdict.value, verdict.steps) == (0.0, ())


def test_a_thought_that_was_cut_off_keeps_its_steps() -> None:
    assert sum_steps(sample((3, 5, 2), "<think>3+5=8;8+"), NoOptions()).steps == ((12, 1.0), (15, 0.0))


def test_problems_that_are_no_sums_are_refused_before_training() -> None:
    prompts = [Prompt("a", (), "<bos>3+5=?", "8", "sums"), Prompt("b", (), "How many?", "8", "sums")]
    with pytest.raises(ValueError, match="problem 'b', reward term 'sum_steps': the prompt 'How many"):
        check_problems([RewardTerm("sum_steps")], prompts)
