"""The metrics of a step of reinforcement learning, and of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from grpo_mega.checkpoint.step_in_progress import StepInProgress
from grpo_mega.run import Metrics
from grpo_mega.types import Group, Score


def step_metrics(current: StepInProgress, success: str, signal: Sequence[bool]) -> Metrics:
    """Metrics of a step whose updates are done; `success` names the term that is reported as accuracy, `signal` says of
    each group whether it has one."""
    means = {name: average(u[name] for u in current.updates) for name in (current.updates or [{}])[0]}
    updates = {name if "/" in name else f"policy/{name}": mean for name, mean in means.items()}
    groups = {"rollout/groups_with_signal": average(signal)} if signal else {}
    return rollout_metrics(current.groups, success) | groups | updates


def rollout_metrics(groups: Sequence[Group], success: str) -> Metrics:
    """Rewards and lengths of a step's answers; `success` names the term that is reported as accuracy.

    `rollout/steps_mean` is the number of tokens at which a rewarded step ends, over the answers whose steps are scored.
    """
    answers = [answer for group in groups for answer in group.answers]
    steps = [len(answer.score.steps) for answer in answers if answer.score.steps]
    return {
        **reward_metrics(groups, success),
        "rollout/length_mean": average(answer.length for answer in answers),
        "rollout/length_max": max(answer.length for answer in answers),
        "rollout/truncated": average(answer.finish_reason == "length" for answer in answers),
        **({"rollout/steps_mean": average(steps)} if steps else {}),
    }


def reward_metrics(groups: Sequence[Group], success: str) -> Metrics:
    """Means over the answers that have a score, by task too when there are several, and the number of those without.

    What no answer has is left out: a term of another task, or all of them when nothing could be scored.
    """
    scores = [(group.prompt.task, answer.score) for group in groups for answer in group.answers]
    scored = [(task, score) for task, score in scores if not score.unscorable]
    terms = mean_terms([score for _, score in scored])
    totals: dict[str, list[float]] = {}
    for task, score in scored:
        totals.setdefault(task, []).append(score.total)
    tasks = {task for task, _ in scores}
    return {
        **({"reward/mean": average(score.total for _, score in scored)} if scored else {}),
        **{f"reward/{name}": value for name, value in terms.items()},
        **({"reward/accuracy": terms[success]} if success in terms else {}),
        "reward/unscorable": len(scores) - len(scored),
        **{f"reward/{task}/total": average(totals[task]) for task in sorted(totals) if len(tasks) > 1},
    }


def mean_terms(scores: Sequence[Score]) -> Metrics:
    """The mean of every term of the reward over the samples that have it."""
    values: dict[str, list[float]] = {}
    for score in scores:
        for name, value in score.terms.items():
            values.setdefault(name, []).append(value)
    return {name: average(of_term) for name, of_term in values.items()}


def achieved(before: Metrics, after: Metrics) -> Metrics:
    """Fields of summary.json: held-out metrics before and after training."""
    names = {"accuracy": "held_out_accuracy", "format": "format_rate", "length": "mean_length"}
    moments = {"before": before, "after": after}
    return {f"{names.get(k, k)}_{when}": x for when, metrics in moments.items() for k, x in metrics.items()}


def average(values: Iterable[float]) -> float:
    """The mean of at least one number."""
    values = list(values)
    return sum(values) / len(values)
