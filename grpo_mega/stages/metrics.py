"""Metrics of a step of reinforcement learning, and of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import pstdev

from grpo_mega.checkpoint.step_in_progress import StepInProgress
from grpo_mega.run import Metrics
from grpo_mega.types import Group, Score


def step_metrics(current: StepInProgress, success: str, signal: Sequence[bool]) -> Metrics:
    """Metrics of a step whose updates are done; `success` names the term that is reported as accuracy, `signal` says
    for each group whether it has signal."""
    means = {name: average(u[name] for u in current.updates) for name in (current.updates or [{}])[0]}
    updates = {name if "/" in name else f"policy/{name}": mean for name, mean in means.items()}
    groups = {"rollout/groups_with_signal": average(signal)} if signal else {}
    return rollout_metrics(current.groups, success) | groups | updates


def rollout_metrics(groups: Sequence[Group], success: str) -> Metrics:
    """Rewards and lengths of a step's answers, as `observe/metric_table.py` defines them; `success` names the term that
    is reported as accuracy."""
    answers = [answer for group in groups for answer in group.answers]
    lengths = sorted(answer.length for answer in answers)
    steps = [len(answer.score.steps) for answer in answers if answer.score.steps]
    return {
        **reward_metrics(groups, success),
        "rollout/tokens": sum(lengths),
        "rollout/length_mean": average(lengths),
        "rollout/length_p50": nearest_rank(lengths, 50),
        "rollout/length_p99": nearest_rank(lengths, 99),
        "rollout/length_max": lengths[-1],
        "rollout/truncated": average(answer.finish_reason == "length" for answer in answers),
        "rollout/repeated": average(answer.repeated for answer in answers),
        **({"rollout/steps_mean": average(steps)} if steps else {}),
        **unanimity(groups, success),
    }


def unanimity(groups: Sequence[Group], success: str) -> Metrics:
    """Shares of groups in which all answers succeed, and in which none does.

    Answers without the term `success` are ignored, as are groups without any answer that has it; {} if no groups are
    left.
    """
    judged = [[a.score.terms[success] for a in group.answers if success in a.score.terms] for group in groups]
    judged = [values for values in judged if values]
    if not judged:
        return {}
    return {
        "rollout/all_right": average(min(values) >= 1 for values in judged),
        "rollout/all_wrong": average(max(values) <= 0 for values in judged),
    }


def reward_metrics(groups: Sequence[Group], success: str) -> Metrics:
    """Means and standard deviation over scored answers, and the number of unscored ones; by task if there are several.

    Terms that no answer has are left out: those of other tasks, or all when nothing could be scored.
    """
    scores = [(group.prompt.task, answer.score) for group in groups for answer in group.answers]
    scored = [(task, score) for task, score in scores if not score.unscorable]
    terms = mean_terms([score for _, score in scored])
    rewards = [score.total for _, score in scored]
    totals: dict[str, list[float]] = {}
    for task, score in scored:
        totals.setdefault(task, []).append(score.total)
    tasks = {task for task, _ in scores}
    return {
        **({"reward/mean": average(rewards), "reward/std": pstdev(rewards)} if rewards else {}),
        **{f"reward/{name}": value for name, value in terms.items()},
        **({"reward/accuracy": terms[success]} if success in terms else {}),
        "reward/unscorable": len(scores) - len(scored),
        **{f"reward/{task}/total": average(totals[task]) for task in sorted(totals) if len(tasks) > 1},
    }


def mean_terms(scores: Sequence[Score]) -> Metrics:
    """Mean of every reward term over the samples that have it."""
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


def nearest_rank(values: Sequence[float], percent: int) -> float:
    """Nearest-rank percentile of sorted values: the smallest that at least `percent` % of them do not exceed."""
    return values[-(-percent * len(values) // 100) - 1]
