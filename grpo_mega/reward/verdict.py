"""Verdict of one reward term on one sample."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """Value of one reward term for one sample.

    Attributes:
        value: Value of the term, before its weight.
        reason: Explanation of the value, in words; may be empty.
        unscorable: Why there is no value, e.g. a service did not answer; empty when there is one.
        steps: (one past the last character in `Sample.text`, reward) of each step of the completion, in order, used by
            process supervision in place of `value`; () for a term that scores no steps.
    """

    value: float
    reason: str = ""
    unscorable: str = ""
    steps: tuple[tuple[int, float], ...] = ()

    def __bool__(self) -> bool:
        """Whether the sample earned anything."""
        return self.value != 0
