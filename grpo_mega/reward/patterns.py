"""Terms by the user's regular expressions, which may take for ever: they run where users' functions do."""

from __future__ import annotations

import re

from grpo_mega.reward.extract import final_answer
from grpo_mega.types import Prompt, Sample

FLAGS = re.DOTALL | re.MULTILINE


def regex(sample: Sample, pattern: str, read: str, whole: bool) -> float:
    """1.0 when the pattern matches the answer; `^` and `$` stand for the ends of lines, `.` for line ends too.

    Args:
        sample: Its problem's metadata has the `pattern` when the argument is "".
        pattern: Python's syntax.
        read: Where the answer stands, as `final_answer` takes it.
        whole: Whether it must match all of the answer, not only a part.

    Raises:
        ValueError: There is no pattern, or it is none.
    """
    expression = compiled(sample.prompt, pattern)
    answer = final_answer(sample, read)
    return float(answer is not None and (expression.fullmatch if whole else expression.search)(answer) is not None)


def compiled(prompt: Prompt, pattern: str) -> re.Pattern[str]:
    """The pattern, or the problem's own for "". Raises ValueError when there is none, or it is none."""
    pattern = pattern or prompt.metadata.get("pattern", "")
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(f"pattern={pattern!r} in the problem's metadata; give one, or one for all in the options")
    try:
        return re.compile(pattern, FLAGS)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} in the problem's metadata is no regular expression: {error}") from None
