"""Checks before training: which reward terms apply to a problem, can score it, and tell a curriculum its pass rate."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace

from grpo_mega.config.puzzles import check_installed
from grpo_mega.config.rules.reward import read_options
from grpo_mega.config.schema import DataConfig, RewardConfig, RewardTerm
from grpo_mega.config.schema.reward import LEARNED
from grpo_mega.reward.answers import right_option
from grpo_mega.reward.code import checked_tests
from grpo_mega.reward.countdown import numbers_and_target
from grpo_mega.reward.patterns import compiled
from grpo_mega.reward.puzzles import checked_puzzle
from grpo_mega.reward.steps import terms_of
from grpo_mega.reward.truths import IDEAL, why_unreachable
from grpo_mega.types import Prompt, Sample

SHOWN = 3
"""Number of problems that a message names."""
READ_PROBLEMS = ("multiple_choice", "countdown", "regex", "reasoning_gym", "code", "sum_steps")
"""Kinds of terms that read more of a problem than its answer."""


def has_task(term: RewardTerm, task: str) -> bool:
    """Whether a term applies to samples of this task."""
    return not term.tasks or task in term.tasks


def check_problems(terms: Sequence[RewardTerm], prompts: Iterable[Prompt]) -> None:
    """Checks that every task has a term, every task of a term a problem, and that terms can score their problems.

    Args:
        terms: The terms of the reward.
        prompts: The problems; not read when all terms apply to all tasks and need only the answer.

    Raises:
        ValueError: A problem has no term, a task no problem, or a term cannot score a problem; names them.
    """
    if not any(term.tasks or term.built_in in READ_PROBLEMS for term in terms):
        return
    tasks: dict[str, str] = {}
    wrong: dict[str, str] = {}
    for prompt in prompts:
        tasks.setdefault(prompt.task, prompt.id)
        for term in terms:
            if has_task(term, prompt.task) and (why := why_not(term, prompt)):
                wrong.setdefault(prompt.id, f"problem {prompt.id!r}, reward term {term.name!r}: {why}")
    for task, prompt_id in tasks.items():
        if not any(has_task(term, task) for term in terms):
            raise ValueError(
                f"problem {prompt_id!r} is of the task {task!r}, which no reward term has: add it to "
                "reward.terms[].tasks of one, or leave those of one empty, which stands for all tasks"
            )
    for index, term in enumerate(terms):
        if unknown := sorted({*term.tasks} - tasks.keys()):
            raise ValueError(
                f"reward.terms[{index}].tasks: no problem is of the task {unknown[0]!r}; tasks of the data: "
                f"{', '.join(sorted(tasks))}"
            )
    if wrong:
        raise ValueError(f"{len(wrong)} problems cannot be scored:\n  " + "\n  ".join([*wrong.values()][:SHOWN]))


def check_curriculum(data: DataConfig, reward: RewardConfig, prompts: Iterable[Prompt]) -> None:
    """Checks that a curriculum knows the pass rates of all training problems.

    Raises:
        ValueError: `data.curriculum` follows a term that the reward or the task of a problem does not have.
    """
    if data.curriculum == "none":
        return
    field = "data.frontier_terms" if data.frontier_terms else "reward.success"
    followed = data.frontier_terms or [reward.success]
    terms = {term.name: term for term in reward.terms}
    if reward.model.path is not None:
        terms[LEARNED] = RewardTerm(name=LEARNED)
    for name in followed:
        if name not in terms:
            raise ValueError(
                f"{field}: {name} is no term of the reward, and data.curriculum={data.curriculum} follows it; choose "
                f"among {', '.join(terms)}"
            )
    for task, example in {prompt.task: prompt.id for prompt in prompts}.items():
        if not any(has_task(terms[name], task) for name in followed):
            raise ValueError(
                f"problem {example!r} is of the task {task!r}, and {field} ({', '.join(followed)}) has no term of it, "
                f"so data.curriculum={data.curriculum} cannot know its pass rate: name a term of every task in "
                "data.frontier_terms"
            )


def why_not(term: RewardTerm, prompt: Prompt) -> str:
    """Why a built-in term can score no completion of a problem, and how to fix it; empty when it can.

    Answers for terms that apply to all tasks are not checked here: the data room checks them line by line.
    """
    try:
        if term.built_in in IDEAL and term.tasks:
            why = why_unreachable([replace(term, tasks=[])], prompt.answer)
            return f"the answer {why}" if why else ""
        if term.built_in == "multiple_choice":
            right_option(prompt)
        if term.built_in == "countdown":
            numbers_and_target(prompt)
        if term.built_in == "regex":
            compiled(prompt, read_options("regex", term.options).pattern)
        if term.built_in == "reasoning_gym":
            check_installed()
            checked_puzzle(prompt)
        if term.built_in == "code":
            checked_tests(Sample(prompt, 0, array("i"), array("f"), "stop", ((0, 0),), ""))
        if term.built_in == "sum_steps":
            terms_of(prompt)
    except ValueError as error:
        return str(error)
    return ""
