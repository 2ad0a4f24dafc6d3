"""Measurements of scored samples: accuracy and other terms, lengths, pass@k, maj@k and rm@k; also by task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grpo_mega.config.schema.reward import LEARNED
from grpo_mega.evaluate.estimates import Estimate, best_of, majority_of, mean_over_problems, preferred_of, sizes
from grpo_mega.evaluate.votes import Votes
from grpo_mega.types import Group

ACCURACY = "accuracy"
"""Name of the reward's success term in results; for one sample drawn at random, so it is pass@1."""
CALLS, ERRORS = "environment/calls", "environment/errors"
"""Names of an environment's calls in a completion, and of the share of calls that were wrong."""
WITHIN = "within"
"""Prefix of within@TOKENS, the accuracy of completions that are cut after that many tokens."""


Values = Sequence[Sequence[float]]
"""For every problem, values of some of its samples."""


def measure_within(within: Mapping[int, Values]) -> dict[str, Estimate]:
    """{within@TOKENS: accuracy of completions that are cut after TOKENS tokens}.

    Args:
        within: Budget in tokens -> success of the samples of each problem; problems without values do not count.
    """
    means = {budget: [_mean(values) for values in of_problems if values] for budget, of_problems in within.items()}
    return {f"{WITHIN}@{budget}": mean_over_problems(values) for budget, values in sorted(means.items()) if values}


def measure(
    groups: Sequence[Group], votes: Votes | None, success: str, within: Mapping[int, Values] | None = None
) -> dict[str, Estimate]:
    """Means over problems of per-problem estimates, with confidence intervals.

    Args:
        groups: The samples of each problem.
        votes: Votes of the samples; None to leave out maj@k.
        success: Reward term that is reported as accuracy.
        within: See `measure_within`; none during training.

    Returns:
        Name -> estimate: accuracy, each other term, length (tokens), truncated (share cut by the length limit), CALLS
        and ERRORS if an environment was called; with several samples pass@k, maj@k and, with a reward model's scores,
        rm@k for every k of `sizes`; within@TOKENS for every budget. A sample without a score counts only in length,
        truncated and calls; a problem counts where it has enough scored samples, and a name without a problem is
        absent.
    """
    called = any(info.calls for group in groups for info in group.infos)
    terms: dict[str, list[float]] = {}
    others: dict[str, list[float]] = {}
    for number, group in enumerate(groups):
        chosen = [i for i, info in enumerate(group.infos) if success in info.score.terms]
        solved = [group.infos[i].score.terms[success] for i in chosen]
        learned = [group.infos[i].score.terms.get(LEARNED) for i in chosen]
        chosen_votes = [votes[number][i] for i in chosen] if votes is not None else None
        values: dict[str, list[float]] = {}
        for info in group.infos:
            _append(values, info.score.terms)  # without a score, no terms
        means = {name: _mean(of_term) for name, of_term in values.items()}
        if success in means:
            means[ACCURACY] = means.pop(success)  # even if another term has that name
        _append(terms, means)
        if called:
            calls = sum(info.calls for info in group.infos)
            _append(others, {CALLS: calls / len(group.infos)})
            # The share of calls that were wrong; none for a problem without calls.
            _append(others, {ERRORS: sum(info.errors for info in group.infos) / calls} if calls else {})
        cut = [float(info.finish_reason == "length") for info in group.infos]
        _append(others, {"length": _mean([info.sampled for info in group.infos]), "truncated": _mean(cut)})
        _append(others, _of_sizes(solved, chosen_votes, learned, len(group.infos)))
    collected = terms | others  # a length overrides a term of the same name
    estimates = {name: mean_over_problems(collected[name]) for name in sorted(collected, key=_order)}
    return estimates | measure_within(within or {})


def by_task(
    groups: Sequence[Group], votes: Votes | None, success: str, within: Mapping[int, Values] | None = None
) -> dict[str, dict[str, Estimate]]:
    """{task: `measure` of its problems}, sorted by the tasks' names."""
    numbers: dict[str, list[int]] = {}
    for number, group in enumerate(groups):
        numbers.setdefault(group.prompt.task, []).append(number)
    return {
        task: measure(
            [groups[i] for i in of_task],
            votes and [votes[i] for i in of_task],
            success,
            {budget: [values[i] for i in of_task] for budget, values in (within or {}).items()},
        )
        for task, of_task in sorted(numbers.items())
    }


def metrics(groups: Sequence[Group], votes: Votes | None, success: str) -> dict[str, float]:
    """Metrics of an evaluation during training: the means of `measure`, also by task when there are several.

    With one sample per problem these are the mean terms and the length. A task's are named TASK/NAME. `unscorable`
    is the number of samples without a score, absent when all have one.
    """
    several = max((len(group.infos) for group in groups), default=1) > 1
    recorded = _means(measure(groups, votes, success), several)
    tasks = by_task(groups, votes, success)
    for task, estimates in tasks.items() if len(tasks) > 1 else ():
        recorded |= {f"{task}/{name}": value for name, value in _means(estimates, several).items()}
    unscorable = unscorable_in(groups)
    return recorded | ({"unscorable": unscorable} if unscorable else {})


def unscorable_in(groups: Sequence[Group]) -> int:
    """Number of samples that could not be scored."""
    return sum(bool(info.score.unscorable) for group in groups for info in group.infos)


def _means(estimates: dict[str, Estimate], several: bool) -> dict[str, float]:
    return {name: e.mean for name, e in estimates.items() if several or name != "truncated"}


def _of_sizes(
    solved: Sequence[float], votes: Sequence[int | None] | None, learned: Sequence[float | None], samples: int
) -> dict[str, float]:
    """pass@k, maj@k and rm@k of a problem, for every k for which it has enough samples."""
    ks = [k for k in sizes(samples) if k <= len(solved)]
    passed = {f"pass@{k}": best_of(solved, k) for k in ks}
    majority = majority_of(solved, votes) if votes is not None and ks else []
    preferred = [score for score in learned if score is not None]
    by_model = {f"rm@{k}": preferred_of(solved, preferred, k) for k in ks} if len(preferred) == len(solved) else {}
    return passed | {f"maj@{k}": majority[k - 1] for k in ks if majority} | by_model


def _order(name: str) -> tuple[int, int]:
    """Sort key of names: accuracy, terms in order of occurrence, lengths, calls, pass@k, maj@k and rm@k by k."""
    kind, _, k = name.partition("@")
    places = (ACCURACY, "term", "length", "truncated", CALLS, ERRORS, "pass@", "maj@", "rm@")
    place = f"{kind}@" if k else name
    return places.index(place if place in places else "term"), int(k or 0)


def _append(lists: dict[str, list[float]], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        lists.setdefault(name, []).append(value)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
