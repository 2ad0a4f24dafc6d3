"""Terms by the scorers of the library reasoning-gym (Stojanovski et al., 2025, arXiv 2505.24760).

An answer is untrusted text that code of a third party reads: it runs where users' functions do, for vetted tasks only
(`config/puzzles.py`), none of whose scorers executes the answer.
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
"""Characters of the longest answer that is scored; the largest grids of the tasks have some 3,000."""
KEY = "reasoning_gym"
"""Of a prompt's metadata: {"task": name, "entry": {"question", "answer", "metadata"}}, as the task made them."""


def solved(sample: Sample, read: str, partial: bool) -> Verdict:
    """What the task's scorer gives the answer: 1.0 for a right one, and with `partial` less for a part of it.

    An answer that the scorer cannot read, which it may say by any exception, earns 0, with the exception as reason.

    Args:
        sample: Its problem's metadata has the task and the entry, see `KEY`.
        read: Where the answer stands, as `final_answer` takes it.
        partial: Whether scores below 1 count; otherwise they are 0.

    Raises:
        ValueError: The problem is of no vetted task.
    """
    task, entry = checked_puzzle(sample.prompt)
    scorer = _scorer(task)
    answer = (final_answer(sample, read) or "").strip()
    if not answer:
        return Verdict(0.0, "no answer")
    if len(answer) > LONGEST:
        return Verdict(0.0, f"the answer has {len(answer):,} characters, and {LONGEST:,} at most are scored")
    try:
        with redirect_stdout(StringIO()):  # some say what is wrong
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
    """The scorer of a task with its default settings, which no vetted one reads."""
    import reasoning_gym  # not needed by other rewards, and so no dependency

    return reasoning_gym.get_score_answer_fn(task)
