"""Reward terms by the scorers of the library reasoning-gym (Stojanovski et al., 2025, arXiv 2505.24760).

An answer is untrusted text that code of a third party reads: it runs in the guarded process, for vetted tasks only
(`config/puzzles.py`), whose scorers never execute the answer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

from grpo_mega.config.puzzles import why_refused
from grpo_mega.reward.extract import final_answer
from grpo_mega.reward.verdict import Verdict
from grpo_mega.types import Prompt, Sample

LONGEST = 10_000
"""Longest answer that is scored, in characters; the largest grids of the tasks have some 3,000."""
KEY = "reasoning_gym"
"""Key of a prompt's metadata for {"task": name, "entry": {"question", "answer", "metadata"}}, as the task generated
them."""


def solved(sample: Sample, read: str, strict: bool, partial: bool) -> Verdict:
    """Score of the answer by the task's scorer: 1.0 if correct, less for partial answers if `partial`.

    An answer on which the scorer raises any exception earns 0, with the exception as reason.

    Args:
        sample: Sample; its prompt's metadata has task and entry, see `KEY`.
        read, strict: Where to read the answer, as in `final_answer`.
        partial: Whether scores below 1 count; otherwise they are 0.

    Raises:
        ValueError: The problem's task is not vetted.
    """
    task, entry = checked_puzzle(sample.prompt)
    scorer = _scorer(task)
    answer = (final_answer(sample, read, strict) or "").strip()
    if not answer:
        return Verdict(0.0, "no answer")
    if len(answer) > LONGEST:
        return Verdict(0.0, f"the answer has {len(answer):,} characters, and {LONGEST:,} at most are scored")
    try:
        with redirect_stdout(StringIO()):  # some print what is wrong
            score = float(scorer(answer, entry))
    except Exception as error:
        return Verdict(0.0, f"the scorer of {task} failed: {type(error).__name__}: {error}")
    if score == 1 or (partial and 0 < score < 1):
        return Verdict(score)
    return Verdict(0.0, "" if 0 <= score < 1 else f"the scorer of {task} gave {score}, which is no score")


def checked_puzzle(prompt: Prompt) -> tuple[str, dict[str, Any]]:
    """Task and entry of a problem. Raises ValueError when its metadata has none, or the task is not vetted."""
    puzzle = prompt.metadata.get(KEY)
    if not isinstance(puzzle, dict) or not isinstance(puzzle.get("entry"), dict):
        raise ValueError(
            f"no {KEY!r} in the metadata; the problem must be of a source with data.sources.NAME.reasoning_gym=TASK"
        )
    task, entry = puzzle.get("task"), puzzle["entry"]
    if why := why_refused(str(task)):
        raise ValueError(f"metadata[{KEY!r}]['task']={task!r}: {why}")
    if lacking := {"question", "answer", "metadata"} - entry.keys():
        raise ValueError(f"metadata[{KEY!r}]['entry'] has no {sorted(lacking)[0]!r}")
    return str(task), entry


@functools.cache
def _scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    """Scorer of a task with its default settings, which no vetted scorer reads."""
    import reasoning_gym  # an optional dependency, not needed by other rewards

    return reasoning_gym.get_score_answer_fn(task)
