"""Table of the built-in kinds of reward terms and the code that computes each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from grpo_mega.errors import InputError
from grpo_mega.platform.trace import span
from grpo_mega.reward.answers import accuracy, boxed_accuracy, exact, last_number, multiple_choice, stated_accuracy
from grpo_mega.reward.code import Programs
from grpo_mega.reward.command import Command
from grpo_mega.reward.countdown import countdown
from grpo_mega.reward.judge import Judge
from grpo_mega.reward.manner import environment, in_template, language, length, overlong, repetition
from grpo_mega.reward.service import Http
from grpo_mega.reward.steps import sum_steps
from grpo_mega.reward.verdict import Verdict
from grpo_mega.types import Sample

VERIFY_THREADS = 4
"""Threads for built-in terms, as a symbolic comparison waits for a worker process."""
Outcomes = Callable[[Sequence[Sample]], list[Verdict | Exception]]
"""Samples -> outcome of a term for each, in order: a verdict, or the exception that prevented one."""
Formula = Callable[[Sample, Any], float | Verdict]
"""(sample, options of the kind) -> value, or verdict."""

FORMULAS: dict[str, Formula] = {
    "accuracy": accuracy,
    "boxed": boxed_accuracy,
    "stated": stated_accuracy,
    "format": in_template,
    "last_number": last_number,
    "multiple_choice": multiple_choice,
    "countdown": countdown,
    "exact": exact,
    "language": language,
    "length": length,
    "overlong": overlong,
    "repetition": repetition,
    "sum_steps": sum_steps,
    "environment": environment,
}

GUARDED = {"regex": "grpo_mega.reward.guarded:regex", "reasoning_gym": "grpo_mega.reward.guarded:solved"}
"""Kind -> function that runs in the guarded process like user functions: a regular expression may take forever and
cannot be interrupted, and a library's scorers may do anything."""

SERVICES: dict[str, type[Programs] | type[Command] | type[Http] | type[Judge]] = {
    "code": Programs,
    "command": Command,
    "http": Http,
    "judge": Judge,
}
"""Kind -> class that runs a program or calls a service."""


def built_in(kind: str, options: Any, seconds: float) -> Outcomes:
    """Outcomes of a kind that needs no guard; `seconds` is the time limit of programs and services."""
    if kind in SERVICES:
        return SERVICES[kind](options, seconds).outcomes
    return partial(_in_threads, partial(_outcome, FORMULAS[kind], options))


def _in_threads(outcome: Callable[[Sample], Verdict | Exception], samples: Sequence[Sample]) -> list[Any]:
    with ThreadPoolExecutor(VERIFY_THREADS, "reward worker") as threads:
        return list(threads.map(outcome, samples))


def _outcome(formula: Formula, options: Any, sample: Sample) -> Verdict | Exception:
    try:
        with span("score"):
            value = formula(sample, options)
        return value if isinstance(value, Verdict) else Verdict(value)
    except InputError as error:
        return error
    # The message names the class, as the text of a KeyError alone says little; the cause keeps the stack trace.
    except Exception as error:
        failure = RuntimeError(f"{type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure
