"""Problems that are there twice are refused, or counted and said."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from grpo_mega.data.overlap import check_held_out, check_repeated, check_split, wording
from grpo_mega.types import Prompt


def problems(name: str, *texts: str) -> list[Prompt]:
    return [Prompt(f"{name}/{i}", (1, 2), text, str(len(text)), "t") for i, text in enumerate(texts, start=1)]


TRAIN = problems("train", "What is 3+5?", "What is 3+6?", "What is 3+7?", "Find x.")
FILE = {"data.train_path=a.jsonl": TRAIN}


@pytest.mark.parametrize("same", ["What is 3+5?", " what  is\n3+5? ", "What\u00a0is 3\uff0b5?"])
def test_the_same_problem_in_other_letters_is_the_same(same: str) -> None:
    test = problems("test", "What is 4+5?", same)
    (warning,) = check_held_out(FILE, test, "data.test_path=b.jsonl", 1)
    assert warning.startswith("1 of the 2 problems of data.test_path=b.jsonl are in data.train_path=a.jsonl too")
    assert "'test/2'" in warning


@pytest.mark.parametrize("other", ["What is 35?", "What is 3-5?", "What is 3+5", "Find y."])
def test_another_problem_is_another(other: str) -> None:
    assert check_held_out(FILE, problems("test", other), "data.test_path=b.jsonl") == []


@pytest.mark.parametrize("count", [1, 3, 4])
def test_a_test_file_that_is_all_trained_on_is_refused(count: int) -> None:
    test = [replace(prompt, id=f"other/{prompt.id}") for prompt in TRAIN[:count]]
    with refused(f"data.test_path=b.jsonl | all {count} problems are in data.train_path=a.jsonl too"):
        check_held_out(FILE, test, "data.test_path=b.jsonl")


def test_more_than_are_allowed_are_refused_with_their_names_and_the_fix() -> None:
    test = problems("test", *(prompt.text for prompt in TRAIN[:3]), "new")
    for allowed in (0, 2):
        with refused("data.test_path=b.jsonl | 'test/1', 'test/2', 'test/3'") as raised:
            check_held_out(FILE, test, "data.test_path=b.jsonl", allowed)
        assert FROM_FILES in raised.value.fix
        assert "data.shared_test_problems=3" in raised.value.fix
    assert len(check_held_out(FILE, test, "data.test_path=b.jsonl", 3)) == 1
    assert len(check_held_out(FILE, test[:3], "data.test_path=b.jsonl", 3)) == 1  # all of them, on purpose


FROM_FILES = "remove them from one of the files (tools/data.py does, with --against)"
OTHERS = "options that generate different problems"


@pytest.mark.parametrize(
    ("train", "test", "fix"),
    [
        (["data.train_path=a.jsonl"], "data.test_path=b.reasoning_gym=c.jsonl", FROM_FILES),
        (["data.sources.a.reasoning_gym=gcd"], "data.sources.b.test_path=b.jsonl", f"choose data.sources.a.{OTHERS}"),
        (
            ["data.sources.a.reasoning_gym=gcd", "data.sources.c.path=c.jsonl"],
            "data.sources.b.test_path=b.jsonl",
            f"{FROM_FILES} and choose data.sources.a.{OTHERS}",
        ),
        (
            ["data.sources.a.reasoning_gym=gcd", "data.sources.c.path=c.jsonl"],
            "data.sources.b.reasoning_gym=gcd",
            f"choose data.sources.b.{OTHERS}, or data.sources.b.test_problems=0",
        ),
    ],
)
def test_the_fix_fits_sources_without_files(train: list[str], test: str, fix: str) -> None:
    sources = dict.fromkeys(train, TRAIN)
    with refused(f"{test} | to keep them apart, {fix}; to accept them, set data.shared"):
        check_held_out(sources, problems("test", TRAIN[1].text, "new"), test)
    of_all = fix if "b.test_problems" in fix else "give a test file"
    with refused(f"{test} | that of training; {of_all}"):
        check_held_out(sources, problems("test", TRAIN[1].text), test)


def test_a_problem_of_two_sources_counts_once() -> None:
    files = FILE | {"data.train_path=c.jsonl": TRAIN[1:]}
    test = problems("test", TRAIN[1].text, "new")
    assert len(check_held_out(files, test, "data.test_path=b.jsonl", 1)) == 2


def test_only_the_first_are_named() -> None:
    test = problems("test", *(prompt.text for prompt in TRAIN), "new")
    (warning,) = check_held_out(FILE, test, "data.test_path=b.jsonl", 4)
    assert warning.startswith("4 of the 5 ")
    assert "'test/1', 'test/2', 'test/3', ..." in warning
    assert "test/4" not in warning


def test_repetitions_in_a_file_are_counted_and_so_are_those_with_other_answers() -> None:
    assert check_repeated(TRAIN, "a.jsonl") == []
    twice = [*TRAIN, *problems("more", "find X.", "What is 3+5?"), *problems("again", "What is 3+5?")]
    (warning,) = check_repeated(twice, "a.jsonl")
    assert warning == "2 problems occur more than once in a.jsonl: 'more/2', 'more/1'"
    twice[-1] = replace(twice[-1], answer="9")
    (warning,) = check_repeated(twice, "a.jsonl")
    assert warning.endswith("; 1 of them with different answers: 'more/2'")


def test_validation_problems_that_are_trained_on_are_counted() -> None:
    assert check_split(TRAIN[:2], TRAIN[2:], "a.jsonl") == []
    assert check_split(TRAIN, [], "a.jsonl") == []
    (warning,) = check_split(TRAIN[:3], TRAIN[2:], "a.jsonl")
    assert warning.startswith(
        "1 of the 2 problems that are held out are trained on too, because a.jsonl repeats them: 'train/3'"
    )


@given(st.text(), st.text(" \n\t\u2003", min_size=1))
def test_white_space_never_tells_problems_apart(text: str, space: str) -> None:
    (one,) = problems("a", f"{text} x")
    assert wording(replace(one, text=f"{space}{text}{space}x{space}")) == wording(one)


def test_what_mathematics_tells_apart_is_told_apart_and_a_composed_accent_is_not() -> None:
    power, product, small, capital, composed, apart = problems(
        "a", "What is 2\u00b2?", "What is 22?", "find a", "find A", "caf\u00e9", "cafe\u0301"
    )
    assert wording(power) != wording(product)
    assert wording(small) != wording(capital)
    assert wording(composed) == wording(apart)
