"""Reward terms that run in the guarded process: user-defined regular expressions, and scorers of reasoning-gym.

A regular expression may never end and cannot be interrupted; a library's scorers may do anything.
"""

from __future__ import annotations

import re

from grpo_mega.errors import InputError
from grpo_mega.judges.puzzles import COLUMN, checked_entry, scorer_of
from grpo_mega.reward.extract import final_answer
from grpo_mega.reward.verdict import Verdict
from grpo_mega.types import Prompt, Sample

FLAGS = re.DOTALL | re.MULTILINE
LONGEST = 10_000
"""Longest answer scored, in characters; the largest grids of the tasks have some 3,000."""


def regex(sample: Sample, pattern: str, read: str, strict: bool, whole: bool) -> float:
    """1.0 when the pattern matches the answer; `^` and `$` match at line ends, `.` matches line ends too.

    Args:
        sample: Sample; its prompt's metadata holds the `pattern` when that argument is "".
        pattern: Regular expression in Python's syntax.
        read: Where to read the answer, as in `final_answer`; "text" is the whole completion, for formats.
        strict: Whether another answer leaves the completion without one, as in `final_answer`.
        whole: Whether the pattern must match the whole answer.

    Raises:
        InputError: The pattern is missing or invalid.
    """
    expression = compiled(sample.prompt, pattern)
    stopped = sample.finish_reason == "stop"
    answer = (sample.text if stopped else None) if read == "text" else final_answer(sample, read, strict)
    return float(answer is not None and (expression.fullmatch if whole else expression.search)(answer) is not None)


def compiled(prompt: Prompt, pattern: str) -> re.Pattern[str]:
    """Compiles the pattern, or the problem's own if it is "". Raises InputError when it is missing or invalid."""
    pattern = pattern or prompt.metadata.get("pattern", "")
    where = f"pattern={pattern!r} in the problem's metadata"
    if not isinstance(pattern, str) or not pattern:
        raise InputError(where, "not a pattern", "write one, or one for all problems in the term's options")
    try:
        return re.compile(pattern, FLAGS)
    except re.error as error:
        raise InputError(where, f"not a regular expression: {error}", "correct it") from None


def solved(sample: Sample, read: str, strict: bool, partial: bool) -> Verdict:
    """Score of the answer to a puzzle by its task's scorer: 1.0 if correct, less for partial answers if `partial`.

    An answer on which the scorer raises any exception earns 0, with the exception as reason.

    Args:
        sample: Sample; its prompt's metadata has task and entry, see `judges.puzzles.COLUMN`.
        read, strict: Where to read the answer, as in `final_answer`.
        partial: Whether scores below 1 count; otherwise they are 0.

    Raises:
        InputError: The problem's task is not vetted.
    """
    task, entry = checked_entry(sample.prompt.metadata.get(COLUMN))
    answer = (final_answer(sample, read, strict) or "").strip()
    if not answer:
        return Verdict(0.0, "no answer")
    if len(answer) > LONGEST:
        return Verdict(0.0, f"the answer has {len(answer):,} characters, and {LONGEST:,} at most are scored")
    # Outside of the `try`: a library that cannot be imported must end the run, not make every answer wrong.
    scorer = scorer_of(task)
    try:
        value = scorer(answer, entry)
    except Exception as error:
        return Verdict(0.0, f"the scorer of {task} failed: {type(error).__name__}: {error}")
    # NaN fails all of these comparisons, and so earns nothing.
    if value == 1 or (partial and 0 < value < 1):
        return Verdict(value)
    return Verdict(0.0, "" if 0 <= value < 1 else f"the scorer of {task} gave {value}, which is not a score")
