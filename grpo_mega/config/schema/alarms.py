"""When a run raises its alarms."""

from __future__ import annotations

from dataclasses import dataclass

ANY = "any"
"""What `run.stop_on` holds when every alarm stops the run."""


@dataclass
class AlarmsConfig:
    """The threshold of each alarm; null turns it off. docs/alarms.md says what each means and what to do then."""

    entropy_collapse: float | None = 0.03
    """Entropy of a token in nats, mean of 10 steps, below which a policy that mostly fails has stopped exploring."""
    kl_runaway: float | None = 1.0
    """KL divergence of a token in nats, median of 5 steps, from the reference or, within a step, the old policy."""
    reward_hacking: float | None = 0.1
    """Fall of the accuracy from its best, means of 10 steps, while the reward or another term rises by as much."""
    truncation: float | None = 0.25
    """Share of answers that the length limit cuts, mean of 10 steps."""
    repetition: float | None = 0.3
    """Share of an answer's stretches of tokens that came before in it, mean of 10 steps."""
    no_signal: float | None = 0.5
    """Share of groups without signal, mean of 10 steps, without those whose problems the run has learned to solve."""
    unscorable: float | None = 0.05
    """Share of answers without a score, mean of 5 steps."""
    mismatch: float | None = 0.1
    """Difference of log-probabilities of engine and trainer in nats, mean over tokens, median of 5 steps."""
    not_finite: int | None = 0
    """Metrics of a step that may be infinite or not a number."""
    expert_imbalance: float | None = 4.0
    """Tokens of the busiest expert over those of the average one, median of 10 steps."""
    slow_phase: float | None = 6.0
    """Seconds of a phase over their median, when it took a minute or more."""
    stragglers: float | None = 1.5
    """Working time of the slowest rank over that of the median rank, median of 10 steps, in most of which it is one."""
    held_out_falling: float | None = 0.1
    """Fall of the validation accuracy from its best, in two evaluations in a row, while the training reward rises."""
