r"""Checks before training: which reward terms apply to a problem, can score it, and tell a curriculum its pass rate;
and which ground truths no completion can match.

A run on problems with such truths learns the format and nothing else, and its accuracy stays at zero for no visible
reason. They are detected with the reward itself.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace

from grpo_mega.config.rules.reward import read_options
from grpo_mega.config.schema import DataConfig, RewardConfig, RewardTerm
from grpo_mega.config.schema.reward import LEARNED
from grpo_mega.config.schema.terms import NoOptions
from grpo_mega.errors import InputError
from grpo_mega.judges.math.verify import MAX_CHARACTERS
from grpo_mega.judges.puzzles import COLUMN, check_installed, checked_entry
from grpo_mega.reward.answers import right_option
from grpo_mega.reward.code import checked_tests
from grpo_mega.reward.countdown import numbers_and_target
from grpo_mega.reward.extract import boxed
from grpo_mega.reward.guarded import compiled
from grpo_mega.reward.kinds import FORMULAS
from grpo_mega.reward.steps import terms_of
from grpo_mega.types import Prompt, Sample

SHOWN = 3
"""Number of problems that a message names."""
READ_PROBLEMS = ("multiple_choice", "countdown", "regex", "reasoning_gym", "code", "sum_steps")
"""Kinds of terms that read more of a problem than its answer."""


IDEAL = {
    "accuracy": "<think>...</think><answer>{}</answer>",
    "boxed": r"\boxed{{{}}}",
    "stated": "Answer: {}",
    "last_number": "{}",
}
"""Kind of term -> completion that scores 1, with {} for the ground truth."""
_PLAIN = re.compile(r"-?[1-9][0-9]{0,14}|0")
"""Truths that all of these accept: a shortcut, as most truths are whole numbers."""
_GSM8K = re.compile(r"####\s*(.*\S)\s*\Z")


def has_task(term: RewardTerm, task: str) -> bool:
    """Whether a term applies to samples of this task."""
    return not term.tasks or task in term.tasks


def check_problems(terms: Sequence[RewardTerm], prompts: Iterable[Prompt]) -> None:
    """Checks that every task has a term, every task of a term a problem, and that terms can score their problems.

    Args:
        terms: The terms of the reward.
        prompts: The problems; not read when all terms apply to all tasks and need only the answer.

    Raises:
        InputError: A problem has no term, a task no problem, or a term cannot score a problem; names them.
    """
    if not any(term.tasks or term.built_in in READ_PROBLEMS for term in terms):
        return
    # One pass, as the problems may be read from disk: findings are collected here and reported below.
    tasks: dict[str, str] = {}
    wrong: dict[str, str] = {}
    for prompt in prompts:
        tasks.setdefault(prompt.task, prompt.id)
        for term in terms:
            if has_task(term, prompt.task) and (why := why_not(term, prompt)):
                wrong.setdefault(prompt.id, f"problem {prompt.id!r}, reward term {term.name!r}: {why}")
    for task, prompt_id in tasks.items():
        if not any(has_task(term, task) for term in terms):
            raise InputError(
                f"problem {prompt_id!r}",
                f"no reward term has its task {task!r}",
                "add it to reward.terms[].tasks of one, or leave those of one empty, which stands for all tasks",
            )
    for index, term in enumerate(terms):
        if unknown := sorted({*term.tasks} - tasks.keys()):
            raise InputError(
                f"reward.terms[{index}].tasks",
                f"no problem is of the task {unknown[0]!r}",
                f"choose tasks of the data: {', '.join(sorted(tasks))}",
            )
    if wrong:
        shown = "".join(f"\n  {why}" for why in [*wrong.values()][:SHOWN])
        raise InputError("reward.terms", f"{len(wrong)} problems cannot be scored:{shown}", "correct or remove them")


def check_curriculum(data: DataConfig, reward: RewardConfig, prompts: Iterable[Prompt]) -> None:
    """Checks that a curriculum knows the pass rates of all training problems.

    Raises:
        InputError: `data.curriculum` follows a term that the reward or the task of a problem does not have.
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
            raise InputError(
                field,
                f"{name} is not a term of the reward, and data.curriculum={data.curriculum} follows it",
                f"choose among {', '.join(terms)}",
            )
    for task, example in {prompt.task: prompt.id for prompt in prompts}.items():
        if not any(has_task(terms[name], task) for name in followed):
            raise InputError(
                f"problem {example!r}",
                f"its task {task!r} has no term among {field} ({', '.join(followed)}), so data.curriculum="
                f"{data.curriculum} cannot know its pass rate",
                "name a term of every task in data.frontier_terms",
            )


def why_not(term: RewardTerm, prompt: Prompt) -> str:
    """Why a built-in term can score no completion of a problem, and how to fix it; empty when it can.

    Answers for terms that apply to all tasks are not checked here: `grpo_mega/data` checks them as it reads the rows.
    """
    try:
        # The term is checked as if it applied to all tasks, since `why_unreachable` skips terms with tasks.
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
            checked_entry(prompt.metadata.get(COLUMN))
        if term.built_in == "code":
            checked_tests(Sample(prompt, 0, array("i"), array("f"), "stop", ((0, 0),), ""))
        if term.built_in == "sum_steps":
            terms_of(prompt)
    except InputError as error:
        return str(error)
    return ""


def why_unreachable(terms: Sequence[RewardTerm], truth: str) -> str | None:
    """Why no completion can match the answer `truth`, and the fix; None when one can.

    Only built-in terms that apply to all tasks are checked, as a user function may read answers in its own way.
    """
    names = {term.name: term.built_in for term in terms if term.built_in in IDEAL and not term.tasks}
    if not names or _PLAIN.fullmatch(truth):
        return None
    # First the known mistakes, each with its fix; then the general test, whether the reward accepts the truth itself.
    if not truth:
        return f"is missing, and reward term {min(names)!r} compares with it; name its column: data.sources.NAME.answer"
    if solution := _GSM8K.search(truth):
        return (
            f"is a whole solution of GSM8K's; write what follows its ####: {solution[1]!r}, or read it with "
            "\"data.sources.NAME.answer_pattern='#### (.*)'\" (grpo_mega.new: --answer-pattern '#### (.*)')"
        )
    if r"\boxed" in truth:
        inside = boxed(truth)
        return rf"holds \boxed, and is compared with what is in a box; write {inside or 'that'!r}"
    if len(truth) > MAX_CHARACTERS:
        return f"has {len(truth)} characters, and {MAX_CHARACTERS} at most are compared; write the final answer alone"
    if boxed(rf"\boxed{{{truth}}}", strict=True) != truth:
        return f"is {truth!r}, whose braces do not match; write every {{ with its }}"
    for name, kind in names.items():
        prompt = Prompt(id="truth", token_ids=(), text="", answer=truth, task="")
        ideal = Sample(prompt, 0, array("i"), array("f"), "stop", ((0, 0),), IDEAL[kind].format(truth))
        if not FORMULAS[kind](ideal, NoOptions()):
            return (
                f"is {truth!r}, which reward term {name!r} does not accept as an answer to itself; write a plain value"
            )
    return None
