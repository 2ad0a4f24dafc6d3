"""The numbers of a step of reinforcement learning, and of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from grpo_mega.algorithm.advantage import has_signal
from grpo_mega.checkpoint.step_in_progress import StepInProgress
from grpo_mega.run import Metrics
from grpo_mega.types import Group


def step_metrics(now: StepInProgress, success: str) -> Metrics:
    """Of a step whose updates are done; `success` names the term reported as accuracy."""
    updates = {f"policy/{name}": average(u[name] for u in now.updates) for name in (now.updates or [{}])[0]}
    with_signal = average(has_signal(group.rewards) for group in now.groups)
    return rollout_metrics(now.groups, success) | {"rollout/groups_with_signal": with_signal} | updates


def rollout_metrics(groups: Sequence[Group], success: str) -> Metrics:
    """Rewards and lengths of a step's answers; `success` names the term reported as accuracy."""
    samples = [sample for group in groups for sample in group.samples]
    terms = {name: average(x for g in groups for x in g.components[name]) for name in groups[0].components}
    return {
        "reward/mean": average(r for g in groups for r in g.rewards),
        **{f"reward/{name}": value for name, value in terms.items()},
        "reward/accuracy": terms[success],
        "rollout/length_mean": average(len(s.token_ids) for s in samples),
        "rollout/length_max": max(len(s.token_ids) for s in samples),
        "rollout/truncated": average(s.finish_reason == "length" for s in samples),
    }


def achieved(before: Metrics, after: Metrics) -> Metrics:
    """Fields of summary.json: held-out results before and after training."""
    names = {"accuracy": "held_out_accuracy", "format": "format_rate", "length": "mean_length"}
    moments = {"before": before, "after": after}
    return {f"{names.get(k, k)}_{when}": x for when, metrics in moments.items() for k, x in metrics.items()}


def average(values: Iterable[float]) -> float:
    """The mean of at least one number."""
    values = list(values)
    return sum(values) / len(values)
