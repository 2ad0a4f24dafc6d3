"""Which code computes each kind of built-in term."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from grpo_mega.platform.trace import span
from grpo_mega.reward.answers import accuracy, boxed_accuracy, exact, last_number, multiple_choice
from grpo_mega.reward.command import Command
from grpo_mega.reward.countdown import countdown
from grpo_mega.reward.format import in_template
from grpo_mega.reward.http import Http
from grpo_mega.reward.judge import Judge
from grpo_mega.reward.manner import language, length, overlong, repetition
from grpo_mega.reward.programs import Programs
from grpo_mega.reward.sums import sum_steps
from grpo_mega.reward.verdict import Verdict
from grpo_mega.types import Sample

VERIFY_THREADS = 4
"""Threads that score built-in terms: a symbolic comparison waits for a worker process."""
Outcomes = Callable[[Sequence[Sample]], list[Verdict | Exception]]
"""Samples -> what a term makes of each, in order: a verdict, or why there is none."""
Formula = Callable[[Sample, Any], float | Verdict]
"""(sample, options of the kind) -> value, or verdict."""

FORMULAS: dict[str, Formula] = {
    "accuracy": accuracy,
    "boxed": boxed_accuracy,
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
}

GUARDED = {"regex": "grpo_mega.reward.patterns:regex", "reasoning_gym": "grpo_mega.reward.puzzles:solved"}
"""Kind -> function that runs as those of users do: an unlucky pattern takes for ever, and nothing else can end it; and
scorers of a library may do anything."""

SERVICES: dict[str, type[Programs] | type[Command] | type[Http] | type[Judge]] = {
    "code": Programs,
    "command": Command,
    "http": Http,
    "judge": Judge,
}
"""Kind -> what runs a program, or asks one or a service."""


def built_in(kind: str, options: Any, seconds: float) -> Outcomes:
    """What a kind that needs no guard makes of samples; `seconds` is the time limit of programs and services."""
    if kind in SERVICES:
        return SERVICES[kind](options, seconds).outcomes
    return partial(_in_threads, partial(_outcome, FORMULAS[kind], options))


def _in_threads(outcome: Callable[[Sample], Verdict | Exception], samples: Sequence[Sample]) -> list[Any]:
    with ThreadPoolExecutor(VERIFY_THREADS, "reward worker") as threads:
        return list(threads.map(outcome, samples))


def _outcome(formula: Formula, options: Any, sample: Sample) -> Verdict | Exception:
    try:
        with span("score"):
            made = formula(sample, options)
        return made if isinstance(made, Verdict) else Verdict(made)
    except Exception as error:
        failure = RuntimeError(f"{type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure
