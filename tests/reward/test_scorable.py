"""Terms by task: which samples have which; and problems that do not fit their terms."""

from __future__ import annotations

from array import array
from contextlib import nullcontext
from dataclasses import replace

import pytest
from refusals import refused

from grpo_mega.config.schema import DataConfig, RewardConfig, RewardModelConfig, RewardTerm
from grpo_mega.reward.compose import build_reward
from grpo_mega.reward.scorable import check_curriculum, check_problems
from grpo_mega.types import Prompt, Sample, Score

TERMS = [RewardTerm("boxed", tasks=["sums"]), RewardTerm("exact", 2.0, tasks=["words", "names"]), RewardTerm("format")]


def prompt(task: str, number: int = 0) -> Prompt:
    return Prompt(f"{task}/{number}", (1,), "?", "8", task)


def sample(task: str, text: str) -> Sample:
    return Sample(prompt(task), 0, array("i", [2]), array("f", [0.0]), "stop", ((0, 0),), text)


def test_a_sample_has_the_terms_of_its_task():
    scores = build_reward(RewardConfig(TERMS, "boxed")).score(
        [sample("sums", r"\boxed{8}"), sample("words", "8"), sample("names", r"\boxed{8}"), sample("other", "8")]
    )
    assert scores == [
        Score(1.0, {"boxed": 1.0, "format": 0.0}),
        Score(2.0, {"exact": 1.0, "format": 0.0}),
        Score(0.0, {"exact": 0.0, "format": 0.0}, r"exact: '\\boxed{8}' is not '8'"),
        Score(0.0, {"format": 0.0}),
    ]


def test_a_sample_without_any_term_is_an_error():
    with pytest.raises(ValueError, match=r"prompt 'code/0', sample 0: no reward term has the task 'code'"):
        build_reward(RewardConfig(TERMS[:2], "boxed")).score([sample("code", "8")])


def test_data_whose_tasks_all_have_terms_pass():
    check_problems(TERMS, [prompt("sums"), prompt("words"), prompt("names"), prompt("other")])
    check_problems(TERMS[2:], map(prompt, "any"))


def test_data_is_not_read_when_all_terms_have_all_tasks():
    check_problems(TERMS[2:], (1 / 0 for _ in range(1)))


def test_a_task_without_a_term_is_refused():
    with refused("'code/7' | no reward term has"):
        check_problems(TERMS[:2], [prompt("sums"), prompt("words"), prompt("names"), prompt("code", 7), prompt("code")])


def test_a_term_of_a_task_that_no_problem_has_is_refused():
    message = "reward.terms[1].tasks | no problem is of the task 'names'"
    with refused(message):
        check_problems(TERMS, [prompt("sums"), prompt("words")])


@pytest.mark.parametrize(
    ("term", "answer", "metadata", "why"),
    [
        (RewardTerm(kind="multiple_choice"), "Berlin", {"choices": ["Rome"]}, "'Berlin': names none of the options"),
        (RewardTerm(kind="multiple_choice"), "B", {"choices": "AB"}, "choices='AB' in the metadata: not a list"),
        (RewardTerm(kind="regex"), "B", {}, "pattern='' in the problem's metadata"),
        (RewardTerm(kind="regex"), "B", {"pattern": "("}, "not a regular expression"),
        (RewardTerm(kind="code"), "", {"tests": []}, "not a list of tests"),
        (RewardTerm(kind="boxed", tasks=["sums"]), "#### 8", {}, "the answer is a whole solution of GSM8K's"),
    ],
)
def test_problems_that_a_term_cannot_score_are_refused(
    term: RewardTerm, answer: str, metadata: dict[str, object], why: str
):
    bad = [Prompt(f"sums/{i}", (1,), "?", answer, "sums", metadata) for i in range(5)]
    good = Prompt("sums/9", (1,), "?", "8", "sums")
    with refused(
        f"reward.terms | 5 problems cannot be scored:\n  problem 'sums/0', reward term '{term.name}'"
    ) as raised:
        check_problems([term, replace(term, name="second")], [*bad, good] if term.tasks else bad)
    assert why in str(raised.value)
    assert str(raised.value).count("\n") == 3
    check_problems([RewardTerm(kind="exact", tasks=["sums"])], bad)


def test_problems_that_their_terms_can_score_pass():
    options = {"choices": ["Rome", "Paris"], "pattern": "a+", "tests": [{"stdin": "", "stdout": "8"}]}
    terms = [RewardTerm(kind=kind) for kind in ("multiple_choice", "regex", "code")]
    check_problems(
        [*terms, RewardTerm("boxed", tasks=["sums"])], [Prompt("sums/1", (1,), "?", "Paris", "sums", options)]
    )
    check_problems([RewardTerm(kind="regex", options={"pattern": "a"})], [prompt("sums")])


@pytest.mark.parametrize(
    ("success", "followed", "words"),
    [
        ("boxed", ["boxed", "exact"], None),
        ("format", [], None),  # a term of all tasks
        ("boxed", ["boxed", "format"], None),
        ("boxed", [], "problem 'words/0' | reward.success (boxed)"),
        ("format", ["boxed"], "'words/0' | data.frontier_terms (boxed)"),
        ("format", ["boxd"], "data.frontier_terms | choose among boxed, exact, format"),
        ("format", ["model"], "data.frontier_terms | term of the reward"),
    ],
)
def test_a_curriculum_follows_a_term_of_every_task(success: str, followed: list[str], words: str | None) -> None:
    data, reward = DataConfig(curriculum="frontier", frontier_terms=followed), RewardConfig(TERMS, success)
    prompts = [prompt("sums"), prompt("words")]
    with refused(words) if words else nullcontext():
        check_curriculum(data, reward, prompts)
    check_curriculum(replace(data, curriculum="none"), reward, prompts)


def test_a_curriculum_may_follow_a_reward_model_alone() -> None:
    reward, data = RewardConfig([], "model", model=RewardModelConfig(path="p")), DataConfig(curriculum="frontier")
    check_curriculum(data, reward, [prompt("sums")])
    with refused("reward.success | term of the reward"):
        check_curriculum(data, replace(reward, success="accuracy"), [prompt("sums")])
