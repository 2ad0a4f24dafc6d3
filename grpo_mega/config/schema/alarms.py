"""Thresholds of the alarms of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from grpo_mega.config.limits import Interval

ANY = "any"
"""Word in `run.stop_on` with which every alarm stops the run."""


@dataclass
class AlarmsConfig:
    """The threshold of each alarm; null turns it off. docs/alarms.md says what each means and what to do then."""

    never_right: Annotated[int | None, Interval("[1, 10]")] = 5
    """Steps, from the first on, without a right answer."""
    entropy_collapse: Annotated[float | None, Interval("(0, inf)")] = 0.03
    """Entropy of a token in nats, mean of 10 steps, below which a policy that mostly fails has stopped exploring."""
    kl_runaway: Annotated[float | None, Interval("(0, inf)")] = 1.0
    """KL divergence of a token in nats, median of 5 steps, from the reference or, within a step, the old policy."""
    reward_hacking: Annotated[float | None, Interval("(0, inf)")] = 0.1
    """Fall of the accuracy from its best, means of 10 steps, while the reward or another term rises by as much."""
    truncation: Annotated[float | None, Interval("[0, 1)")] = 0.25
    """Share of answers that the length limit cuts, mean of 10 steps."""
    repetition: Annotated[float | None, Interval("[0, 1)")] = 0.3
    """Share of an answer's stretches of tokens that came before in it, mean of 10 steps."""
    no_signal: Annotated[float | None, Interval("[0, 1)")] = 0.5
    """Share of groups without signal, mean of 10 steps, without those whose problems the run has learned to solve."""
    unscorable: Annotated[float | None, Interval("[0, 1)")] = 0.05
    """Share of answers without a score, mean of 5 steps."""
    mismatch: Annotated[float | None, Interval("(0, inf)")] = 0.1
    """Difference of log-probabilities of engine and trainer in nats, mean over tokens, median of 5 steps."""
    not_finite: Annotated[int | None, Interval("[0, inf)")] = 0
    """Metrics of a step that may be infinite or not a number."""
    expert_imbalance: Annotated[float | None, Interval("(1, inf)")] = 4.0
    """Tokens of the busiest expert over those of the average one, median of 10 steps."""
    slow_phase: Annotated[float | None, Interval("(1, inf)")] = 6.0
    """Seconds of a phase over their median, when it took a minute or more."""
    stragglers: Annotated[float | None, Interval("(1, inf)")] = 1.5
    """Working time of the slowest rank over that of the median rank, median of 10 steps, in most of which it is one."""
    held_out_falling: Annotated[float | None, Interval("(0, inf)")] = 0.1
    """Fall of the validation accuracy from its best, in two evaluations in a row, while the training reward rises."""
