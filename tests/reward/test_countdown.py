"""Expressions of given numbers: which are right, and that nothing else earns anything or is executed."""

from __future__ import annotations

import json
from array import array
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from forks import run_python
from hypothesis import given
from hypothesis import strategies as st
from ranks import REPOSITORY
from refusals import refused

from grpo_mega.config.schema import RewardConfig, RewardTerm
from grpo_mega.data.tasks.countdown import key, problems
from grpo_mega.errors import InputError
from grpo_mega.reward.compose import build_reward
from grpo_mega.reward.scorable import check_problems
from grpo_mega.types import Prompt, Sample

Tree = Any
numbers = st.integers(0, 99)
trees = st.recursive(numbers, lambda tree: st.tuples(st.sampled_from("+-*/"), tree, tree), max_leaves=6)


def prompt(nums: Any, answer: str = "6") -> Prompt:
    return Prompt("p/1", (1,), "?", answer, "countdown", {} if nums is None else {"nums": nums})


def score(nums: list[int], target: int, text: str, read: str = "text") -> float:
    term = RewardTerm(name="countdown", options={"read": read})
    sample = Sample(prompt(nums, str(target)), 0, array("i", [2]), array("f", [0.0]), "stop", ((0, 0),), text)
    (found,) = build_reward(RewardConfig([term], "countdown")).score([sample])
    return found.total


def leaves(tree: Tree) -> list[int]:
    return [tree] if isinstance(tree, int) else leaves(tree[1]) + leaves(tree[2])


def written(tree: Tree) -> str:
    return str(tree) if isinstance(tree, int) else f"({written(tree[1])} {tree[0]} {written(tree[2])})"


def value(tree: Tree) -> Fraction:
    if isinstance(tree, int):
        return Fraction(tree)
    a, b = value(tree[1]), value(tree[2])
    return {"+": a + b, "-": a - b, "*": a * b}[tree[0]] if tree[0] != "/" else a / b


@given(trees, st.integers(-3, 3))
def test_an_expression_is_right_when_its_value_is(tree: Tree, off: int) -> None:
    try:
        exact = value(tree)
    except ZeroDivisionError:
        assert score(leaves(tree), 1, written(tree)) == 0
        return
    target = exact.numerator + off
    assert score(leaves(tree), target, written(tree)) == (target == exact)


@given(trees, numbers)
def test_every_number_must_stand_once(tree: Tree, other: int) -> None:
    try:
        target = value(tree)
    except ZeroDivisionError:
        return
    nums = leaves(tree)
    assert score([*nums, other], int(target), written(tree)) == 0
    assert score(nums[1:] or [other + 100], int(target), written(tree)) == 0


@pytest.mark.parametrize(
    "text",
    [
        "1+2+3 = 6", "6", "1+2+", "", "  ", "2**3-1-1", "1//2+3+5", "1(2)+3", "(1,2,3)", "()", "1+2+3)", "(1+2+3",
        "01+2+3", "1_0-2-2", "1.0+2+3", "+-*/", "__import__('os')", "1+2+3#", "1e0+2+3", "\uff11+2+3", "1+2+3\n",
        "9" * 300, "(" * 150 + "1+2+3" + ")" * 150, "(" * 90 + "1+2+3" + ")" * 90 + "+", "-" * 190, "3-2-1+6",
    ],
)  # fmt: skip
def test_what_is_no_such_expression_earns_nothing(text: str) -> None:
    assert score([1, 2, 3], 6, text) == (1 if text.strip() == "1+2+3" else 0)


@pytest.mark.parametrize("text", ["1+2+3", " (1 + 2) + 3", "-(-1-2)+3", "+1+2+3", "3*2*1", "2-(1-3)+1-1+2"])
def test_the_answer_stands_in_its_tag(text: str) -> None:
    right = sorted(int(sign) for sign in text if sign.isdigit()) == [1, 2, 3]
    assert score([3, 1, 2], 6, f"<think>1+1</think><answer>{text}</answer>", "tag") == right
    assert score([3, 1, 2], 6, f"<answer>{text}</answer><answer>1</answer>", "tag") == 0
    assert score([3, 1, 2], 6, f"<think><answer>1</answer></think><answer>{text}</answer>", "tag") == right


@pytest.mark.parametrize(
    ("nums", "answer", "message"),
    [
        (None, "6", "reward.terms | a list of whole numbers"),
        ([], "6", "reward.terms | a list of whole numbers"),
        ([1, "2"], "6", "reward.terms | a list of whole numbers"),
        ([1, True], "6", "reward.terms | a list of whole numbers"),
        ([1, 2], "six", "reward.terms | the answer 'six'"),
        ([1, 2], "9" * 5000, "reward.terms | whole number"),
    ],
)
def test_problems_without_numbers_are_refused_before_training(nums: Any, answer: str, message: str) -> None:
    with refused(message):
        check_problems([RewardTerm(name="countdown")], [prompt(nums, answer)])


def test_a_problem_without_numbers_is_an_input_error_of_its_sample_too() -> None:
    with pytest.raises(InputError, match=r"prompt 'p/1'.*nums") as raised:
        score([], 6, "6")
    assert raised.value.fix


def reachable(nums: list[Fraction]) -> set[Fraction]:
    """All values of expressions in which every number stands once, found in another way than problems are made."""
    if len(nums) == 1:
        return {nums[0]}
    found: set[Fraction] = set()
    for chosen in product((False, True), repeat=len(nums) - 1):
        left = [nums[0], *(n for n, side in zip(nums[1:], chosen, strict=True) if side)]
        right = [n for n, side in zip(nums[1:], chosen, strict=True) if not side]
        if right:
            for a, b in product(reachable(left), reachable(right)):
                found |= {a + b, a - b, b - a, a * b} | ({a / b} if b else set()) | ({b / a} if a else set())
    return found


def made(*words: str, code: int = 0) -> str:
    """What the tool that makes problems prints."""
    done = run_python(REPOSITORY / "tools" / "countdown.py", *words)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def test_the_problems_that_are_made_differ_and_can_be_solved(tmp_path: Path) -> None:
    made(str(tmp_path / "made"), "--train", "60", "--test", "20")
    rows = {
        name: [json.loads(line) for line in (tmp_path / "made" / f"{name}.jsonl").open()] for name in ("train", "test")
    }
    assert {name: len(of) for name, of in rows.items()} == {"train": 60, "test": 20}
    every = [row for of in rows.values() for row in of]
    assert len({key(row["nums"], row["answer"]) for row in every}) == 80
    for row in every[::5]:  # trying everything takes a second
        assert Fraction(row["answer"]) in reachable([Fraction(n) for n in row["nums"]])
    for row in every:
        assert str(row["nums"]) in row["prompt"]
        assert f"equals {row['answer']}." in row["prompt"]
    assert "test.jsonl exists; remove it" in made(str(tmp_path / "made"), "--seed", "1", code=2)
    again, other = problems(0), problems(1)
    assert [next(again) for _ in range(80)] == rows["test"] + rows["train"]
    assert next(other) != rows["test"][0]


@pytest.mark.parametrize("words", [["--train", "0"], ["--test", "600000"]])
def test_a_number_of_problems_that_cannot_be_made_is_refused(tmp_path: Path, words: list[str]) -> None:
    assert "choose 1 or more of each" in made(str(tmp_path / "none"), *words, code=2)
    assert not (tmp_path / "none").exists()
