"""Which samples give the same answer."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from grpo_mega.config.schema import RewardConfig, RewardTerm
from grpo_mega.evaluate.votes import LONGEST, answer_numbers, ballot_of
from grpo_mega.types import Prompt, Sample


def sample(text: str, reason: str = "stop") -> Sample:
    return Sample(Prompt("p", (1,), "?", "8", "sums"), 0, array("i", [1]), array("f", [0.0]), reason, ((0, 0),), text)


def reward(success: str, *terms: RewardTerm) -> RewardConfig:
    return RewardConfig([RewardTerm(name="format"), *terms], success=success)


def numbers(config: RewardConfig, *texts: str) -> list[int | None]:
    ballot = ballot_of(config)
    assert ballot is not None
    return answer_numbers([ballot.read(sample(text)) for text in texts], ballot.same)


def test_answers_in_tags_vote_for_their_value() -> None:
    texts = ["<answer>1/2</answer>", "<answer> 0.5 </answer>", "none", "<answer>2</answer>", "<answer>0.50</answer>"]
    assert numbers(reward("accuracy", RewardTerm(name="accuracy")), *texts) == [0, 0, None, 1, 0]


def test_answers_in_boxes_vote_for_their_value() -> None:
    texts = [r"\boxed{\frac{1}{2}}", r"\boxed{}", r"\boxed{1/2}", r"\boxed{1} or \boxed{2}", r"\boxed{\text{a b}}"]
    assert numbers(reward("right", RewardTerm(name="right", kind="boxed")), *texts) == [0, None, 0, 1, 2]


def test_exact_answers_vote_as_the_term_compares_them() -> None:
    for ignored, expected in ((True, [0, 0, 1]), (False, [0, 1, 2])):
        term = RewardTerm(name="exact", options={"read": "tag", "ignore_case": ignored})
        texts = ["<answer>Yes  now</answer>", "<answer>yes now</answer>", "<answer>no</answer>"]
        assert numbers(reward("exact", term), *texts) == expected


def test_last_numbers_vote_for_their_value_and_cut_completions_do_not_vote() -> None:
    config = reward("last_number", RewardTerm(name="last_number"))
    assert numbers(config, "3 and 5 make 8.", "so 8.0", "\u22128", "none", "it is -8", "1,000") == [0, 0, 1, None, 1, 2]
    ballot = ballot_of(config)
    assert ballot
    assert ballot.read(sample("it is 8", "length")) is None


def test_options_vote_by_letter_or_text() -> None:
    config = reward("multiple_choice", RewardTerm(name="multiple_choice"))
    ballot = ballot_of(config)
    assert ballot
    asked = replace(sample("").prompt, answer="B", metadata={"choices": ["Rome", "Paris"]})
    texts = ["The answer is (B).", "Paris", "A", "The answer is A. No, the answer is B.", "The answer is (C)", "b"]
    read = [ballot.read(replace(sample(text), prompt=asked)) for text in texts]
    assert answer_numbers(read, ballot.same) == [0, 0, 1, 0, None, 0]


def test_an_endless_answer_does_not_vote() -> None:
    texts = [f"<answer>{'1' * length}</answer>" for length in (LONGEST, LONGEST + 1)]
    assert numbers(reward("accuracy", RewardTerm(name="accuracy")), *texts) == [0, None]


@pytest.mark.parametrize(
    "config", [reward("mine", RewardTerm(name="mine", function="my:f")), reward("format"), reward("absent")]
)
def test_nobody_votes_where_only_the_term_knows_the_answer(config: RewardConfig) -> None:
    assert ballot_of(config) is None
