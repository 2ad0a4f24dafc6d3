"""Verdict of one reward term on one sample: its class, parsing of users' verdicts, and a sample as users get it."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

from grpo_mega.types import Sample


@dataclass(frozen=True)
class Verdict:
    """Value of one reward term for one sample.

    Attributes:
        value: Value of the term, before its weight.
        reason: Explanation of the value, in words; may be empty.
        unscorable: Why there is no value, e.g. a service did not answer; empty when there is one.
        steps: (one past the last character in `Sample.text`, reward) of each step of the completion, in order, used by
            process supervision in place of `value`; () for a term that scores no steps.
        turns: The same for steps that end with a turn, (index of last token in `Sample.token_ids`, reward).
    """

    value: float
    reason: str = ""
    unscorable: str = ""
    steps: tuple[tuple[int, float], ...] = ()
    turns: tuple[tuple[int, float], ...] = ()

    def __bool__(self) -> bool:
        """Whether the sample earned anything."""
        return self.value != 0


MOST_CHARACTERS = 4000
"""Largest number of characters of a reason, or of an invalid value shown in an error."""
MOST_END = 1 << 40
"""Upper bound on the position of a step's end; no completion is as long."""
FORMS = (
    "a reward must be a finite number (a float, int or bool), a pair (number, reason), or have the fields value, "
    "reason, unscorable and steps"
)
STEPS = (
    "its steps must be pairs (end, reward): one past the step's last character, from 1 on and rising, and a finite "
    "number"
)


class NoVerdict(ValueError):
    """Error: a returned value is not a verdict; the message shows it."""


def read_verdict(returned: object) -> Verdict:
    """The verdict in a returned value: a number, a pair (number, reason), or an object or dictionary of its fields.

    In an object or dictionary, `reason`, `unscorable` and `steps` may be missing or None, and with `unscorable` also
    `value`.

    Raises:
        NoVerdict: The value is none of these, a number is not finite, a reason is not text, or steps are out of order.
    """
    value, reason, unscorable, steps = _fields(returned)
    # Services and programs write null where they have nothing to say.
    words = [part or "" for part in (reason, unscorable)]
    if not all(isinstance(part, str) for part in words):
        raise NoVerdict(f"returned {shown(returned)}; its reason must be text")
    reason, unscorable = (part[:MOST_CHARACTERS] for part in words)
    if unscorable:
        return Verdict(0.0, reason, unscorable)
    number = _finite(value)
    if number is None:
        raise NoVerdict(f"returned {shown(returned)}; {FORMS}")
    return Verdict(number, reason, steps=_steps(returned, () if steps is None else steps))


def shown(value: object) -> str:
    """Beginning of a value's representation; the name of its type if that fails."""
    try:
        return repr(value)[:MOST_CHARACTERS]
    # Python refuses to print integers of thousands of digits, and a user's `__repr__` may raise anything.
    except Exception:
        return f"a {type(value).__name__}"


def _finite(value: Any) -> float | None:
    """The value as a finite number; None for other values, and for numbers beyond the range of floats."""
    try:
        return float(value) if isinstance(value, numbers.Real) and math.isfinite(value) else None
    except OverflowError:
        return None


def _steps(returned: object, steps: Any) -> tuple[tuple[int, float], ...]:
    """Steps of a verdict, checked to be in order."""
    read: list[tuple[int, float]] = []
    for step in steps if isinstance(steps, (tuple, list)) else (steps,):
        # Anything invalid becomes an end of 0 or no reward, which the test below refuses.
        end, reward = step if isinstance(step, (tuple, list)) and len(step) == 2 else (0, None)
        number = _finite(reward)
        end = int(end) if isinstance(end, numbers.Integral) and end < MOST_END else 0
        if number is None or end <= (read[-1][0] if read else 0):
            raise NoVerdict(f"returned {shown(returned)}; {STEPS}; number {len(read) + 1} is {shown(step)}")
        read.append((end, number))
    return tuple(read)


def _fields(returned: Any) -> tuple[Any, Any, Any, Any]:
    """(value, reason, unscorable, steps) as returned, of any type."""
    if isinstance(returned, dict):
        return returned.get("value"), returned.get("reason"), returned.get("unscorable"), returned.get("steps")
    if isinstance(returned, (tuple, list)) and len(returned) == 2:
        return returned[0], returned[1], None, None
    if not isinstance(returned, numbers.Number) and hasattr(returned, "value"):
        reason, unscorable, steps = (getattr(returned, name, None) for name in ("reason", "unscorable", "steps"))
        return returned.value, reason, unscorable, steps
    return returned, None, None, None


def sample_json(sample: Sample) -> dict[str, Any]:
    """The sample's fields as JSON types; `tokens` is the number of sampled tokens."""
    prompt = sample.prompt
    return {
        "id": prompt.id,
        "index": sample.index,
        "task": prompt.task,
        "prompt": prompt.text,
        "answer": prompt.answer,
        "metadata": prompt.metadata,
        "completion": sample.text,
        "finish_reason": sample.finish_reason,
        "tokens": sample.sampled,
    }
