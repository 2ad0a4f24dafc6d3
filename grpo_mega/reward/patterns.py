"""Reward terms by user-defined regular expressions, which may never end: they run in the guarded process."""

from __future__ import annotations

import re

from grpo_mega.reward.extract import final_answer
from grpo_mega.types import Prompt, Sample

FLAGS = re.DOTALL | re.MULTILINE


def regex(sample: Sample, pattern: str, read: str, strict: bool, whole: bool) -> float:
    """1.0 when the pattern matches the answer; `^` and `$` match at line ends, `.` matches line ends too.

    Args:
        sample: Sample; its prompt's metadata holds the `pattern` when that argument is "".
        pattern: Regular expression in Python's syntax.
        read: Where to read the answer, as in `final_answer`; "text" is the whole completion, for formats.
        strict: Whether another answer leaves the completion without one, as in `final_answer`.
        whole: Whether the pattern must match the whole answer.

    Raises:
        ValueError: The pattern is missing or invalid.
    """
    expression = compiled(sample.prompt, pattern)
    stopped = sample.finish_reason == "stop"
    answer = (sample.text if stopped else None) if read == "text" else final_answer(sample, read, strict)
    return float(answer is not None and (expression.fullmatch if whole else expression.search)(answer) is not None)


def compiled(prompt: Prompt, pattern: str) -> re.Pattern[str]:
    """Compiles the pattern, or the problem's own if it is "". Raises ValueError when it is missing or invalid."""
    pattern = pattern or prompt.metadata.get("pattern", "")
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(f"pattern={pattern!r} in the problem's metadata; give one, or one for all in the options")
    try:
        return re.compile(pattern, FLAGS)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} in the problem's metadata is no regular expression: {error}") from None
