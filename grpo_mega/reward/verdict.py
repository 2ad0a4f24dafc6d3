"""What one term of the reward says of one sample."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """The value of one term of the reward for one sample.

    Attributes:
        value: The term's value, before its weight.
        reason: Why it has this value, in words; empty when there is nothing to say.
        unscorable: Why there is no value, such as a service that did not answer; empty when there is one.
        steps: (one past its last character in `Sample.text`, its reward) of each step of the completion, in order, for
            process supervision, which takes them for `value`; () for a term that scores no steps.
    """

    value: float
    reason: str = ""
    unscorable: str = ""
    steps: tuple[tuple[int, float], ...] = ()
