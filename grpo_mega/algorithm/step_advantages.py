"""Advantages of all samples of a step, including normalisation over the whole batch.

Every rank knows the scores and lengths of all samples of a step, so nothing here depends on the layout. A sample
without a score is left out of its group, as if it had never been sampled.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_mega.algorithm.advantage import Steps, group_advantages, has_signal, process_advantages
from grpo_mega.types import Group, sampled_spans


@dataclass(frozen=True)
class AdvantageOptions:
    """Options of the advantages.

    Attributes:
        baseline: Baseline subtracted from a reward: one of `advantage.BASELINES`, or "batch", the mean of all samples;
            with "critic" advantages are not relative to other samples, and not computed here.
        std: Divisor of the difference, one of `advantage.STDS`: of those over all samples, "batch" is the standard
            deviation of the differences, "batch_rewards" that of the rewards.
        terms: Name -> nonzero weight of the reward terms that are normalised separately; empty to normalise the total
            reward.
        drop: Whether groups without signal are left out of statistics over the batch.
        by_step: Whether steps (`Score.steps`) are rewarded instead of completions: see `process_supervision`.
    """

    baseline: str = "mean"
    std: str = "sample"
    terms: Mapping[str, float] = field(default_factory=dict)
    drop: bool = False
    by_step: bool = False


def groups_with_signal(groups: Sequence[Group], options: AdvantageOptions) -> list[bool]:
    """Whether each group has signal: samples with nonzero advantages.

    That is the case if the rewards of at least two samples differ (see `has_signal`), in any term if terms are
    normalised separately; with the baseline of the batch, where a reward differs from it; by step, where there are two
    samples and two steps differ; with a critic, every group with a score.
    """
    # A critic compares with its own values, not with other samples, so a single score is enough.
    if options.baseline == "critic":
        return [bool(group.rewards) for group in groups]
    if options.baseline == "batch":
        mean = _mean(groups)
        return [any(has_signal([reward, mean], options.std) for reward in group.rewards) for group in groups]
    if options.by_step:
        columns = ([reward for of_sample in _steps(group) for _, reward in of_sample] for group in groups)
        return [has_signal(column, options.std) for column in columns]
    return [any(has_signal(column, options.std) for _, column in _columns(group, options)) for group in groups]


def step_advantages(groups: Sequence[Group], signal: Sequence[bool], options: AdvantageOptions) -> Tensor:
    """Advantage of every sample of a step; 0 without signal, and for samples without a score.

    `signal` is the result of `groups_with_signal` for these groups.

    - REINFORCE++ (arXiv 2501.03262), global advantage normalization: baseline "batch", std "batch"; its variant with a
      baseline: "mean", "batch". Statistics are over samples, each of which counts once, not over tokens.
    - Lite PPO (arXiv 2508.08221): "mean", "batch_rewards".
    - GDPO (arXiv 2601.05242): `terms`, "mean", "sample"; the weighted sum of the terms' advantages is
      divided by its deviation over the batch.
    - Advantages relative to the group only: see `group_advantages`.

    Standard deviations over the batch have n - 1 under the root. The mean over the batch is subtracted only for the
    baseline "batch": where a group has its own baseline, equal rewards keep an advantage of exactly 0.

    Returns:
        [samples] float32, group after group.

    Raises:
        ValueError: See `group_advantages`.
    """
    assert not options.by_step, "a sample has as many advantages as tokens then"
    if options.baseline == "batch":
        mean = _mean(groups)
        rewards = [torch.tensor(group.rewards, dtype=torch.float64) for group in groups]
        # Without signal the difference from the mean is rounding, which must become exactly 0.
        values = [(of_group - mean) * has for of_group, has in zip(rewards, signal, strict=True)]
    else:
        values = [_relative(group, options) for group in groups]
    # Groups that will be left out of the update must not change the scale of those that are kept.
    counted = [number for number, has in enumerate(signal) if has or not options.drop]
    scale = 1.0
    if options.std == "batch_rewards":
        scale = _deviation([torch.tensor(groups[number].rewards, dtype=torch.float64) for number in counted])
    elif options.std == "batch" or options.terms:
        scale = _deviation([values[number] for number in counted])
    # `values` has scored samples only; `masked_scatter` puts them, in order, where `scored` is True.
    scored = torch.tensor([not info.score.unscorable for group in groups for info in group.infos], dtype=torch.bool)
    of_scored = torch.cat([torch.zeros(0, dtype=torch.float64), *values]) / scale
    return torch.zeros(len(scored)).masked_scatter(scored, of_scored.float())


def process_supervision(groups: Sequence[Group], options: AdvantageOptions, numbers: Sequence[int]) -> list[Tensor]:
    """Token advantages with rewards of steps (DeepSeekMath, arXiv 2402.03300, section 4.1.3).

    A scored sample without steps counts as a single step, rewarded with the total. Where a group has fewer than two
    samples with a score, all are 0.

    Args:
        groups: All groups of a step.
        options: `by_step`, and `std`: see `process_advantages`.
        numbers: Samples of the step, numbered from 0, group after group.

    Returns:
        For each of `numbers`, [its sampled tokens] float32.

    Raises:
        ValueError: A step ends outside its completion; see `process_advantages`.
    """
    advantages: dict[int, Tensor] = {}
    first, wanted = 0, {*numbers}
    for group in groups:
        of_group = range(first, first + len(group.infos))
        first = of_group.stop
        # Other replicas compute all samples of this group.
        if wanted.isdisjoint(of_group):
            continue
        advantages |= {n: torch.zeros(info.length) for n, info in zip(of_group, group.infos, strict=True)}
        scored = [n for n in of_group if not group.infos[n - of_group.start].score.unscorable]
        if steps := _steps(group):
            # An empty completion still has a reward, at a token that it lacks: one is added here, and cut off again.
            lengths = [max(1, len(advantages[n])) for n in scored]
            of_scored = process_advantages(steps, lengths, options.std)
            advantages |= {n: of_one[: len(advantages[n])] for n, of_one in zip(scored, of_scored, strict=True)}
    infos = [info for group in groups for info in group.infos]
    at_sampled = []
    for number in numbers:
        column, spans = advantages[number], sampled_spans(infos[number].length, infos[number].given)
        # The empty first piece stands for a completion without sampled tokens, which `cat` would refuse.
        at_sampled.append(torch.cat([column[:0], *(column[begin:end] for begin, end in spans)]))
    return at_sampled


def _steps(group: Group) -> list[Steps]:
    """Steps of each scored sample; [] when there are fewer than two."""
    scored = [info for info in group.infos if not info.score.unscorable]
    if len(scored) < 2:
        return []
    return [info.score.steps or ((max(0, info.length - 1), info.score.total),) for info in scored]


def _mean(groups: Sequence[Group]) -> float:
    """Mean reward of all samples, exactly, so that equal rewards equal it; 0 when there are none."""
    return statistics.mean([float(reward) for group in groups for reward in group.rewards] or [0.0])


def _columns(group: Group, options: AdvantageOptions) -> list[tuple[float, list[float]]]:
    """(weight, value for each scored sample) of the rewards that are normalised separately."""
    if not options.terms:
        return [(1.0, list(group.rewards))]
    # All samples of a group have the same terms, those of its task, so the first score speaks for all; groups of other
    # tasks may lack a term.
    scores = [info.score for info in group.infos if not info.score.unscorable]
    return [
        (w, [s.terms[name] for s in scores]) for name, w in options.terms.items() if scores and name in scores[0].terms
    ]


def _relative(group: Group, options: AdvantageOptions) -> Tensor:
    """[scored samples] float64 advantages relative to the group; 0 with fewer than two samples."""
    lengths = [info.sampled for info in group.infos if not info.score.unscorable]
    total = torch.zeros(len(lengths), dtype=torch.float64)
    for weight, column in _columns(group, options) if len(lengths) > 1 else ():
        rewards = torch.tensor(column, dtype=torch.float64)
        total += weight * group_advantages(rewards, options.std, options.baseline, lengths)
    return total


def _deviation(parts: Sequence[Tensor]) -> float:
    """Sample standard deviation of all values of these vectors; 1 if they are equal."""
    values = torch.cat([torch.zeros(0, dtype=torch.float64), *parts])
    if not has_signal(values.tolist(), std="batch"):
        return 1.0
    # Divided by the largest first: squares of the values may over- or underflow, those of the quotients do not.
    size = values.abs().max()
    return float(size * (values / size).std())
