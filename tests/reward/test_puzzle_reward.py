"""Answers to problems of reasoning-gym, scored by its scorers in the guarded process."""

from __future__ import annotations

import re
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from grpo_mega.config.schema import RewardConfig, RewardTerm, SourceConfig
from grpo_mega.errors import InputError
from grpo_mega.judges.puzzles import REFUSED, VETTED
from grpo_mega.reward.compose import build_reward
from grpo_mega.reward.guarded import LONGEST, solved
from grpo_mega.reward.scorable import check_problems
from grpo_mega.types import Prompt, Sample

TERM = RewardTerm(kind="reasoning_gym")
ENTRY = {"question": "?", "answer": "6", "metadata": {}}
WRONG = ("banana", "nan", "inf", "-1e999999", "9" * 5000, "9**9**9**9", "[[null]]", "{}", "0/0", "\x00", "[" * 3000)
"""None of these is the answer to any problem."""


def prompt(puzzle: Any, answer: str = "6") -> Prompt:
    return Prompt("p/1", (1,), "?", answer, "t", {} if puzzle is None else {"reasoning_gym": puzzle})


def sample(of: Prompt, text: str) -> Sample:
    return Sample(of, 0, array("i", [2]), array("f", [0.0]), "stop", ((0, 0),), text)


@pytest.mark.parametrize(
    ("puzzle", "message"),
    [
        (None, "metadata['reasoning_gym']: missing"),
        ({"task": "gcd", "entry": {"answer": "6"}}, "['entry']: has no 'metadata'"),
        ({"task": "n_queens", "entry": ENTRY}, f"'n_queens': {REFUSED['n_queens']}"),
        ({"task": "none", "entry": ENTRY}, "'none': reasoning-gym 0.1.25 has no such task"),
    ],
)
def test_what_has_no_vetted_scorer_is_refused_before_training(puzzle: Any, message: str) -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (pip install -e '.[puzzles]')")
    with refused(f"reward.terms | {message}"):
        check_problems([TERM], [prompt(puzzle)])
    with pytest.raises(InputError, match=re.escape(message)):
        solved(sample(prompt(puzzle), "6"), "text", False, False)


def test_without_the_library_the_term_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with refused("reward.terms | none is installed; pip install reasoning-gym==0.1.25"):
        check_problems([TERM], [prompt({"task": "gcd", "entry": ENTRY})])


@pytest.fixture(scope="module")
def made() -> dict[str, list[Prompt]]:
    """Some problems of every vetted task."""
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (pip install -e '.[puzzles]')")
    from grpo_mega.data.stored import puzzles

    problems = {}
    for task in VETTED:
        rows, _ = puzzles(SourceConfig(reasoning_gym=task, problems=4, test_problems=0), "data.sources.a")
        problems[task] = [prompt(row.fields["reasoning_gym"], row.fields["answer"]) for row in rows]
    return problems


def test_every_task_gives_its_own_answers_all_and_wrong_ones_nothing(made: dict[str, list[Prompt]]) -> None:
    for task, problems in made.items():
        for problem in problems:
            assert solved(sample(problem, f" {problem.answer}\n"), "text", False, False).value == 1.0, task
            for text in WRONG:
                assert solved(sample(problem, text), "text", False, False).value == 0.0, (task, text[:20])
                assert 0.0 <= solved(sample(problem, text), "text", False, True).value < 1.0, (task, text[:20])


def test_terms_run_in_the_guarded_process(made: dict[str, list[Prompt]]) -> None:
    term = RewardTerm(name="solved", kind="reasoning_gym", options={"read": "tag"})
    reward = build_reward(RewardConfig([term], "solved"))
    (factors, divisor) = made["prime_factorization"][0], made["gcd"][0]
    texts = [(divisor, divisor.answer), (divisor, "x"), (factors, "banana"), (factors, factors.answer), (divisor, "")]
    scores = reward.score([sample(of, f"so <answer>{text}</answer>") for of, text in texts])
    assert [score.total for score in scores] == [1.0, 0.0, 0.0, 1.0, 0.0]
    assert scores[2].reason.startswith("solved: the scorer of prime_factorization failed: ValueError: ")
    assert scores[4].reason == "solved: no answer"
    (long,) = reward.score([sample(divisor, f"<answer>{'0' * LONGEST}{divisor.answer}</answer>")])
    assert "at most are scored" in long.reason


def test_a_part_of_the_score_counts_when_it_is_asked_for(made: dict[str, list[Prompt]]) -> None:
    problem = made["emoji_mystery"][0]
    almost = sample(problem, problem.answer[:-1] + ("a" if problem.answer[-1] != "a" else "b"))
    assert solved(almost, "text", False, False).value == 0.0
    assert 0.5 < solved(almost, "text", False, True).value < 1.0


def test_a_score_beyond_the_full_one_is_none(made: dict[str, list[Prompt]]) -> None:
    """The scorer of calendar_arithmetic gives more than 1 to wrong numbers where the right one is negative."""
    problem = next(p for p in made["calendar_arithmetic"] if p.answer.isdecimal())
    puzzle = problem.metadata["reasoning_gym"]
    negative = prompt(puzzle | {"entry": puzzle["entry"] | {"answer": "-1"}}, "-1")
    wrong = solved(sample(negative, "5"), "text", False, True)
    assert (wrong.value, "which is not a score" in wrong.reason) == (0.0, True)
    assert solved(sample(negative, "-1"), "text", False, True).value == 1.0
