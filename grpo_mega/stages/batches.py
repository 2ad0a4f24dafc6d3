"""Batches of updates from scored answers.

The samples of each mini-batch, and those that count in its denominators, follow from the answers, which every rank has,
and are the same under every layout. Tokens and log-probs are only on the replica that computes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from grpo_mega.algorithm.mini_batches import MiniBatch, make_mini_batches
from grpo_mega.algorithm.step_advantages import (
    AdvantageOptions,
    groups_with_signal,
    process_supervision,
    step_advantages,
)
from grpo_mega.algorithm.weights import token_weights
from grpo_mega.checkpoint.step_in_progress import StepInProgress
from grpo_mega.config.schema import Config, RolloutConfig
from grpo_mega.models.topology import Topology
from grpo_mega.stages.exchange import exchange_samples
from grpo_mega.types import Batch, Group, Rollout


def advantage_options(config: Config) -> AdvantageOptions:
    """Options of the advantages, from the configuration."""
    algorithm = config.algorithm
    weights = {term.name: term.weight for term in config.reward.terms if term.weight}
    terms = weights if algorithm.terms_apart else {}
    drop = algorithm.groups_without_signal != "count"
    by_step = algorithm.supervision == "process"
    return AdvantageOptions(algorithm.advantage_baseline, algorithm.advantage_std, terms, drop, by_step)


def trained_and_counted(groups: Sequence[Group], config: Config) -> tuple[list[int], list[int]]:
    """Numbers of the samples that updates compute, and of the samples that count in the denominators.

    A group without signal has advantages of 0. By equation 3 of DeepSeekMath its samples still count, and the KL term,
    like an entropy bonus, has a gradient; with neither of the two they have no gradient and are not computed. A sample
    without a score is treated as never sampled.

    With a teacher every sample has a gradient, whatever its reward.
    """
    signal = groups_with_signal(groups, advantage_options(config))
    samples = [(has, answer) for group, has in zip(groups, signal, strict=True) for answer in group.answers]
    if config.distill.teacher:
        return [*range(len(samples))], [*range(len(samples))]
    scored = [i for i, (_, answer) in enumerate(samples) if not answer.score.unscorable]
    with_signal = [i for i in scored if samples[i][0]]
    if config.algorithm.groups_without_signal != "count":
        return with_signal, with_signal
    return (scored if config.algorithm.kl_coef or config.algorithm.entropy_coef else with_signal), scored


def mini_batches(groups: Sequence[Group], config: Config, step: int) -> list[MiniBatch]:
    """The mini-batches of a step, epoch after epoch; a pure function, so a resumed step has the same."""
    return [
        part for epoch in range(config.algorithm.epochs) for part in mini_batches_of_epoch(groups, config, step, epoch)
    ]


def mini_batches_of_epoch(groups: Sequence[Group], config: Config, step: int, epoch: int) -> list[MiniBatch]:
    """The mini-batches of one epoch, which together have all samples that updates compute.

    Epochs may have different numbers of them: a mini-batch with nothing to compute is left out.
    """
    trained, counted = trained_and_counted(groups, config)
    seed = f"{config.run.seed}/mini-batches/{step}/{epoch}"
    return make_mini_batches(counted, trained, config.algorithm.mini_batches, seed)


def make_batch(rollout: Rollout, config: Config, topology: Topology, step: int) -> Batch | None:
    """This replica's share of the samples that updates compute, with advantages; None when there are none.

    Every rank must call it: samples are sent from the ranks that hold them to those that compute them.
    """
    first_epoch = mini_batches_of_epoch(rollout.groups, config, step, epoch=0)
    if not first_epoch:
        return None
    batch = exchange_samples(rollout, [mini_batch.trained for mini_batch in first_epoch], config, topology)
    return with_advantages(batch, rollout.groups, config)


def with_advantages(batch: Batch, groups: Sequence[Group], config: Config) -> Batch:
    """The batch with advantages at the learned tokens, by sample or by step; those of a critic are added later."""
    options = advantage_options(config)
    if options.baseline == "critic":
        return batch
    if options.by_step:
        of_tokens = torch.cat([torch.zeros(0), *process_supervision(groups, options, batch.numbers.tolist())])
        return batch.with_(advantage=torch.zeros(len(batch.mask)).masked_scatter(batch.mask, of_tokens))
    advantages = step_advantages(groups, options)
    return batch.with_(advantage=advantages[batch.numbers].repeat_interleave(batch.lengths) * batch.mask)


def batch_of_all(rollout: Rollout, config: Config, topology: Topology) -> Batch:
    """This replica's share of all samples of a step, for measuring the mismatch; every rank must call it."""
    return exchange_samples(rollout, [list(range(sum(1 for _ in rollout.answers)))], config, topology)


def batch_of(current: StepInProgress, mini_batch: MiniBatch, config: Config, step: int) -> Batch:
    """This replica's share of a mini-batch, with token weights over all samples that count in it."""
    assert current.batch is not None, "without a batch there are no mini-batches"
    lengths = [answer.length for group in current.groups for answer in group.answers]
    row = {number: i for i, number in enumerate(current.batch.numbers.tolist())}
    part = current.batch.select([row[i] for i in mini_batch.trained if i in row])
    counted = [lengths[i] for i in (*mini_batch.trained, *mini_batch.left_out)]
    longest = longest_completion(config.rollout, step)
    weight = token_weights(part.mask, part.cu_seqlens, config.algorithm.aggregation, longest, counted)
    return part.with_(weight=weight)


def with_newest(whole: Batch, part: Batch, logprob: torch.Tensor, entropy: torch.Tensor) -> Batch:
    """The batch with the log-probs and entropies [tokens of the part] that an update computed for some sequences."""
    starts = whole.cu_seqlens.tolist()
    place = {number: slice(starts[row], starts[row + 1]) for row, number in enumerate(whole.numbers.tolist())}

    def replaced(column: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor:
        column = torch.zeros(len(whole.tokens)) if column is None else column.clone()
        for number, of_sequence in zip(part.numbers.tolist(), values.split(part.lengths.tolist()), strict=True):
            column[place[number]] = of_sequence
        return column

    return whole.with_(
        new_logprob=replaced(whole.new_logprob, logprob), new_entropy=replaced(whole.new_entropy, entropy)
    )


def longest_completion(rollout: RolloutConfig, step: int) -> int:
    """Largest number of tokens of a completion after `step` steps; it changes at `rollout.longer_from_step`."""
    longer, since = rollout.longer_max_new_tokens, rollout.longer_from_step
    return rollout.max_new_tokens if longer is None or since is None or step < since else longer
