"""Ground truths that nothing can equal are found before training, and the message says what to write instead."""

from __future__ import annotations

import pytest

from grpo_mega.config.schema import RewardTerm
from grpo_mega.reward.scorable import why_unreachable

TERMS = {name: [RewardTerm(name=name), RewardTerm(name="format", weight=0.2)] for name in ("accuracy", "boxed")}
OWN = [RewardTerm(name="accuracy", function="my_rewards:accuracy"), RewardTerm(name="format")]

BAD = [
    ("We add 1 and 1.\n1 + 1 = <<1+1=2>>2\n#### 2", "write what follows its ####: '2'"),
    ("#### 1,000 ", "write what follows its ####: '1,000'"),
    (r"so \boxed{2}", "write '2'"),
    (r"\boxed{2", "write 'that'"),
    ("9" * 2000, "has 2000 characters, and 1000 at most are compared; write the final answer alone"),
    ("{{{{", "braces do not match"),
    (r"\frac{1}{2", "braces do not match"),
    (r"1}{2", "braces do not match"),
]


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize(("truth", "fix"), BAD, ids=[truth[:15] for truth, _ in BAD])
def test_what_no_answer_can_equal_is_refused_with_the_way_out(term: str, truth: str, fix: str) -> None:
    assert fix in (why_unreachable(TERMS[term], truth) or "")


@pytest.mark.parametrize("truth", ["<answer>2</answer>", "2</think>"])
def test_what_the_reward_would_not_extract_is_refused(truth: str) -> None:
    why = why_unreachable(TERMS["accuracy"], truth)
    assert (
        why == f"is {truth!r}, which reward term 'accuracy' does not accept as an answer to itself; write a plain value"
    )
    boxed = why_unreachable(TERMS["boxed"], truth)  # which sees the end of thoughts in the second, and nothing after it
    assert boxed == (why.replace("accuracy", "boxed") if "think" in truth else None)


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize(
    "truth",
    ["2", " 2", "-1,000.5", r"\frac{1}{2}", r"\{1, 2\}", "[0, 1)", "blue whale", r"\left(3, \frac{\pi}{2}\right)",
     "# 3", r"\text{Tuesday}", "x" * 1000, "3 = 3", "1/0"],
)  # fmt: skip
def test_what_can_be_answered_is_left_alone(term: str, truth: str) -> None:
    assert why_unreachable(TERMS[term], truth) is None


def test_about_a_users_own_term_nothing_is_said() -> None:
    assert [why_unreachable(OWN, truth) for truth, _ in BAD] == [None] * len(BAD)
