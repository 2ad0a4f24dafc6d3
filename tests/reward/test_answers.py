"""Terms that compare final answers: last number, multiple choice, exact text, regular expressions, boxed format."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.config.schema import RewardConfig, RewardTerm
from grpo_mega.errors import InputError
from grpo_mega.reward.answers import option
from grpo_mega.reward.compose import Reward, build_reward
from grpo_mega.types import Prompt, Sample

CITIES = ["Rome", "Paris", "Bonn", "Prague"]


def sample(text: str, answer: str, finish_reason: str = "stop", **metadata: Any) -> Sample:
    prompt = Prompt("p/1", (1,), "?", answer, "t", metadata)
    return Sample(prompt, 0, array("i", [2]), array("f", [0.0]), finish_reason, ((0, 0),), text)


def reward(kind: str, **options: Any) -> Reward:
    return build_reward(RewardConfig([RewardTerm(kind=kind, options=options)], kind))


def value(built: Reward, of: Sample) -> float:
    return built.score([of])[0].total


LAST_NUMBER = reward("last_number")


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("3 and 5 make 8.", "8"),
        ("so it costs $1,250.50 in all", "1250.5"),
        ("that is \u22123 degrees", "-3"),
        ("x = -3", "-3"),
        ("**18**", "18"),
        ("3 - 5 = -2!", "-2"),
        ("a share of 3/4, then", "3/4"),
        ("about 25%", "25"),
        ("#### 42\n", "42"),
        ("(12)", "12"),
        ("10-5", "5"),
        ("1,2345", "2345"),
    ],
)
def test_the_last_number_counts(text: str, truth: str):
    assert value(LAST_NUMBER, sample(text, truth)) == 1.0


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("8, not 9", "8"),
        ("", "8"),
        ("none", "8"),
        ("10-5", "-5"),
        ("1,250", "250"),
        ("18.5", "5"),
        ("80", "8"),
        ("3/8", "8"),
    ],
)
def test_other_numbers_and_parts_of_numbers_do_not(text: str, truth: str):
    assert value(LAST_NUMBER, sample(text, truth)) == 0.0


def test_numbers_of_the_thoughts_are_no_answer():
    assert value(LAST_NUMBER, sample("<think>It is 8</think> It is eight", "8")) == 0.0
    assert value(LAST_NUMBER, sample("<think>It is 7</think> It is 8", "8")) == 1.0


def test_a_text_that_was_cut_has_not_come_to_its_answer():
    for kind, options in (("last_number", {}), ("exact", {}), ("multiple_choice", {}), ("regex", {"pattern": "B"})):
        truth = "8" if kind == "last_number" else "B"
        built = reward(kind, **options)
        assert value(built, sample(truth, truth)) == 1.0
        assert value(built, sample(truth, truth, "length")) == 0.0


@given(st.text(alphabet="0123456789.,-/$% x\u2212", max_size=60), st.integers(-(10**6), 10**6))
def test_whatever_comes_before_the_last_number_counts_for_nothing(before: str, number: int):
    assert value(LAST_NUMBER, sample(f"{before} so {number}", str(number))) == 1.0
    assert value(LAST_NUMBER, sample(f"{before} so {number}, no, {number + 1}", str(number))) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        *("B", "b", "(B)", "(b)", "B.", "B)", "B: Paris", "(B) Paris", "B. paris.", "Paris", " paris. ", "**B**"),
        *(r"\text{B}", r"$\textbf{(B)}$", "The answer is B.", "... so the answer is (B)", "Final answer: **B**"),
        *("Answer: B", r"The answer is $\boxed{B}$", "the correct answer is B because it is.", "ANSWER: B. Paris"),
        *("A is wrong. The answer is B", "The answer is B. Yes, the answer is (B)!", r"\mathbf{B}"),
    ],
)
def test_the_right_option_is_named_by_letter_or_text(text: str):
    built = reward("multiple_choice")
    for truth in ("B", "(B)", "Paris", "B. Paris"):
        assert value(built, sample(text, truth, choices=CITIES)) == 1.0
        assert value(built, sample(text, "Rome", choices=CITIES)) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "E",
            "(A) Paris",
            "B. London",
            "A or B",
            "A, B",
            "AB",
            "Paris, Rome",
            "not B",
            "Option B",
            "The answer is A or B",
            "The answer is (B) and (C).",
            "The answer is B, C",
        ),
        *(
            "The answer is B. No, the answer is C.",
            "The answer is a city in France",
            "The answer is not B",
            "Bonn is big",
        ),
        *("The answer is E", "B or C is the answer", "The answer is Because"),
    ],
)
def test_anything_else_names_none(text: str):
    built = reward("multiple_choice")
    assert value(built, sample(text, "B", choices=CITIES)) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "<think>The answer is A.</think>The answer is B.",
        "The answer is A. No, the answer is B.",
        "Answer: B. I am sure.",
    ],
)
def test_the_option_stated_last_counts_unless_strict(text: str):
    assert value(reward("multiple_choice"), sample(text, "B", choices=CITIES)) == 1.0
    assert value(reward("multiple_choice"), sample(text, "A", choices=CITIES)) == 0.0
    one = "No" not in text
    assert value(reward("multiple_choice", strict=True), sample(text, "B", choices=CITIES)) == one


def test_the_answer_that_is_stated_earns_its_reward():
    built, strict = reward("stated"), reward("stated", strict=True)
    texts = ("Answer: 8", "The answer is $8.0$.", "Answer: 9", "8", "The answer is 9. Wait. The answer is 8.")
    assert [value(built, sample(text, "8")) for text in texts] == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert [value(strict, sample(text, "8")) for text in texts] == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert value(built, sample("Answer: 8", "8", "length")) == 0.0


@pytest.mark.parametrize(
    ("text", "truth", "right"),
    [
        (r"$x=\boxed{2}$ and $y=\boxed{2}$", "(2, 2)", 1.0),
        (r"$(\boxed{2},\boxed{2})$", "(2, 2)", 1.0),
        (r"$x=\boxed{2}$ or $x=\boxed{-3}$", "-3, 2", 1.0),
        (r"$y=\boxed{5}$ and $x=\boxed{3}$", "(3, 5)", 1.0),
        (r"$x=\boxed{5}$ and $y=\boxed{3}$", "(3, 5)", 0.0),
        (r"\boxed{0.5}, that is \boxed{\frac{1}{2}}", "1/2", 1.0),
        (r"\boxed{1}, \boxed{2}, \boxed{1}", "(2, 1)", 0.0),
        (r"\boxed{5}, \boxed{6} or \boxed{7}", "7", 0.0),
        (r"\boxed{2}, \boxed{3}", "3", 0.0),
    ],
)
def test_boxes_in_one_sentence_are_one_answer(text: str, truth: str, right: float):
    assert value(reward("boxed"), sample(text, truth)) == right


@pytest.mark.parametrize(
    "text",
    [
        "**Answer: C**\n\nWhy not B? Because answer B ignores friction.",
        "The answer is C. (Answer B is wrong.)",
        "Is the answer B? No. The answer is C.",
    ],
)
def test_an_option_that_is_spoken_about_is_not_chosen(text: str):
    built = reward("multiple_choice")
    assert [value(built, sample(text, truth, choices=CITIES)) for truth in "BC"] == [0.0, 1.0]


def test_what_was_read_is_the_reason():
    (right, wrong, none) = reward("boxed").score([sample(text, "8") for text in (r"\boxed{8}", r"\boxed{9}", "8")])
    assert (right.reason, wrong.reason, none.reason) == ("", "boxed: '9' is not '8'", "boxed: no answer")


def test_an_article_is_no_option():
    built = reward("multiple_choice")
    texts = ("The answer is A city in France", "The answer is A, a city in France", "The answer is A")
    assert [value(built, sample(text, "A", choices=CITIES)) for text in texts] == [0.0, 1.0, 1.0]


def test_options_without_texts_are_letters_alone():
    built = reward("multiple_choice")
    assert [value(built, sample(text, "D")) for text in ("D", "(D) whatever", "Paris", "C")] == [1.0, 1.0, 0.0, 0.0]


def test_an_option_whose_text_is_a_number_is_named_by_it():
    built = reward("multiple_choice", read="boxed")
    choices = ["4", "3", "2"]
    assert [value(built, sample(rf"\boxed{{{x}}}", "3", choices=choices)) for x in ("3", "B", "2")] == [1.0, 1.0, 0.0]
    assert value(built, sample("The answer is B", "3", choices=choices)) == 0.0


def test_a_truth_that_names_no_option_is_an_error():
    with pytest.raises(InputError, match=r"'multiple_choice', prompt 'p/1', sample 0: .*'Berlin': names none of"):
        reward("multiple_choice").score([sample("B", "Berlin", choices=CITIES)])
    with pytest.raises(InputError, match=r"choices=7 in the metadata: "):
        reward("multiple_choice").score([sample("B", "B", choices=7)])


@given(st.lists(st.text(min_size=1, max_size=8), max_size=5, unique=True), st.text(max_size=12))
def test_an_option_is_one_of_those_there_are(choices: list[str], text: str):
    letter = option(text, choices)
    assert letter is None or (letter.isupper() and (not choices or ord(letter) - ord("A") < len(choices)))


def test_exact_compares_the_whole_text_or_what_was_asked_for():
    assert value(reward("exact"), sample(" Paris\n", "Paris")) == 1.0
    assert value(reward("exact"), sample("a  b", "a b")) == 1.0
    assert value(reward("exact"), sample("paris", "Paris")) == 0.0
    assert value(reward("exact", ignore_case=True), sample("paris", "Paris")) == 1.0
    assert value(reward("exact"), sample("It is Paris", "Paris")) == 0.0
    assert value(reward("exact", read="tag"), sample("It is <answer> Paris</answer>", "Paris")) == 1.0
    assert value(reward("exact", read="boxed"), sample(r"It is \boxed{Paris}", "Paris")) == 1.0
    assert value(reward("exact", read="boxed"), sample("Paris", "Paris")) == 0.0
    assert value(reward("exact"), sample(" ", " ")) == 0.0


def test_a_pattern_matches_a_part_or_the_whole():
    assert value(reward("regex", pattern=r"^\d+$"), sample("so\n42\nit is", "")) == 1.0
    assert value(reward("regex", pattern=r"\d+", whole=True), sample("42 it is", "")) == 0.0
    assert value(reward("regex", pattern=r"\d+", whole=True, read="boxed"), sample(r"\boxed{42} it is", "")) == 1.0


def test_a_problem_may_bring_its_own_pattern():
    built = reward("regex")
    assert [value(built, sample(text, "", pattern="gr[ae]y")) for text in ("so grey", "so green")] == [1.0, 0.0]
    with pytest.raises(RuntimeError, match=r"'regex', prompt 'p/1', .*pattern='' in the problem's metadata: "):
        built.score([sample("x", "")])
    with pytest.raises(RuntimeError, match=r"pattern='\(' in the problem's metadata: not a regular"):
        built.score([sample("x", "", pattern="(")])


def test_a_pattern_that_never_ends_is_ended():
    term = RewardTerm(kind="regex", options={"pattern": "(a+)+$", "read": "text"})
    built = build_reward(RewardConfig([term], "regex", 1.0, "leave_out"))
    first, second = built.score([sample("a" * 100 + "b", ""), sample("aa", "")])
    assert "no value within reward.timeout_seconds=1" in first.unscorable
    assert second.total == 1.0


def test_the_boxed_format_is_an_answer_in_a_box():
    built, strict = reward("format", template="boxed"), reward("format", template="boxed", strict=True)
    texts = (r"so \boxed{9}", r"\boxed{}", "9", r"\boxed{9}. So \boxed{8}.")
    assert [value(built, sample(text, "8")) for text in texts] == [1.0, 0.0, 0.0, 1.0]
    assert [value(strict, sample(text, "8")) for text in texts] == [1.0, 0.0, 0.0, 0.0]
    assert value(built, sample(r"\boxed{8}", "8", "length")) == 0.0


@pytest.mark.parametrize("kind", ["exact", "countdown", "regex"])
def test_strict_reading_of_the_whole_text_is_refused_as_it_has_no_effect(kind: str) -> None:
    more = {"pattern": "8"} if kind == "regex" else {}
    with pytest.raises(ValueError, match="strict=true: no effect with read=text"):
        reward(kind, read="text", strict=True, **more)
    reward(kind, read="boxed", strict=True, **more)
    reward("multiple_choice", read="text", strict=True)


@pytest.mark.parametrize(
    ("kind", "text", "truth", "right"),
    [
        ("boxed", r"\boxed{C, A}", "AC", 1.0),
        ("boxed", r"\boxed{CA}", "AC", 0.0),
        ("boxed", r"\boxed{C, B}", "AC", 0.0),
        ("stated", "The answer is 5. As 5 is odd, the answer is an integer.", "5", 1.0),
        ("stated", "Answer: 5\n\nNote that the answer is positive.", "5", 1.0),
        ("stated", "The answer is 5. No, the answer is 6.", "5", 0.0),
        ("stated", "So the answer is positive.", "positive", 1.0),
    ],
)
def test_lists_of_options_and_what_is_said_of_an_answer(kind: str, text: str, truth: str, right: float) -> None:
    assert value(reward(kind), sample(text, truth)) == right
