"""What a step computes, from its scored samples: mini-batches, advantages, corrections, token weights, the loss.

The samples of each mini-batch, and those that count in its denominators, follow from what every rank knows of
them, and are the same under every layout. Tokens and log-probs are only on the replica that computes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from grpo_kernels import LossOptions
from grpo_mega.algorithm.correction import CorrectionOptions, correction_factors, share_beyond
from grpo_mega.algorithm.mini_batches import make_mini_batches
from grpo_mega.algorithm.objective import Loss, grpo_loss
from grpo_mega.algorithm.step_advantages import (
    AdvantageOptions,
    groups_with_signal,
    process_supervision,
    step_advantages,
)
from grpo_mega.algorithm.weights import token_weights
from grpo_mega.config.derived import corrects_beyond_tokens, skips_old_pass
from grpo_mega.config.schema import AlgorithmConfig, Config, RewardConfig, RolloutConfig
from grpo_mega.models.topology import Topology
from grpo_mega.rollout.stream import Slices, slices_of
from grpo_mega.run import Metrics
from grpo_mega.stages.exchange import ExchangeOptions, exchange_samples
from grpo_mega.types import Batch, Group, MiniBatch, Rollout, SampleInfo, Step


@dataclass(frozen=True)
class StepOptions:
    """The settings of a step: what is generated, and what its updates compute.

    Attributes:
        algorithm, rollout: Sections of the configuration.
        advantages: Options of the advantages.
        exchange: How samples are distributed over replicas.
        taught: Whether a teacher gives every sample a gradient, whatever its reward.
        skips_old_pass: Whether the old policy's log-probs need no pass, as a step's only update begins at that policy.
        seed: The run's seed, which shuffles mini-batches.
    """

    algorithm: AlgorithmConfig
    rollout: RolloutConfig
    advantages: AdvantageOptions
    exchange: ExchangeOptions
    taught: bool
    skips_old_pass: bool
    seed: int

    @property
    def slices(self) -> Slices:
        """The slices in which a step's samples are generated."""
        return slices_of(self.rollout, self.algorithm.prompts_per_step)

    @classmethod
    def of(cls, config: Config) -> StepOptions:
        """The options of a run."""
        return cls(
            config.algorithm,
            config.rollout,
            advantage_options(config.algorithm, config.reward),
            ExchangeOptions.of(config.layout, config.model, config.rollout),
            taught=bool(config.distill.teacher),
            skips_old_pass=skips_old_pass(config.algorithm, config.distill),
            seed=config.run.seed,
        )


def advantage_options(algorithm: AlgorithmConfig, reward: RewardConfig) -> AdvantageOptions:
    """Options of the advantages, from the configuration."""
    weights = {term.name: term.weight for term in reward.terms if term.weight}
    return AdvantageOptions(
        baseline=algorithm.advantage_baseline,
        std=algorithm.advantage_std,
        terms=weights if algorithm.terms_apart else {},
        drop=algorithm.groups_without_signal != "count",
        by_step=algorithm.supervision == "process",
    )


def step_of(groups: list[Group], options: StepOptions, done: int, version: int = 0) -> Step:
    """The step after `done` steps, before its batch: which samples updates compute, which count in the denominators,
    mini-batches. `version` is that of the policy before its updates.

    A group without signal has advantages of 0. By equation 3 of DeepSeekMath its samples still count, and the KL term,
    like an entropy bonus, has a gradient; with neither of the two they have no gradient and are not computed. A sample
    without a score is treated as never sampled. With a teacher every sample has a gradient, whatever its reward.

    Epochs may have different numbers of mini-batches: a mini-batch with nothing to compute is left out.
    """
    algorithm = options.algorithm
    signal = groups_with_signal(groups, options.advantages)
    samples = [(has, info) for group, has in zip(groups, signal, strict=True) for info in group.infos]
    scored = [number for number, (_, info) in enumerate(samples) if not info.score.unscorable]
    with_signal = [number for number in scored if samples[number][0]]
    if options.taught:
        trained = counted = [*range(len(samples))]
    elif algorithm.groups_without_signal != "count":
        trained = counted = with_signal
    else:
        trained, counted = scored if algorithm.kl_coef or algorithm.entropy_coef else with_signal, scored
    seeds = [f"{options.seed}/mini-batches/{done}/{epoch}" for epoch in range(algorithm.epochs)]
    epochs = [make_mini_batches(counted, trained, algorithm.mini_batches, seed) for seed in seeds]
    return Step(groups, signal, epochs, version=version)


def batch_of_step(rollout: Rollout, step: Step, options: StepOptions, topology: Topology) -> Batch | None:
    """This replica's share of the samples that updates compute, with advantages; None when there are none.

    Every rank must call it: samples are sent from the ranks that hold them to those that compute them.
    """
    first_epoch = step.epochs[0]
    if not first_epoch:
        return None
    parts = [mini_batch.trained for mini_batch in first_epoch]
    batch = exchange_samples(rollout, parts, options.exchange, topology)
    return with_advantages(batch, rollout.groups, step.signal, options.advantages)


def batch_of_all(rollout: Rollout, options: ExchangeOptions, topology: Topology) -> Batch:
    """This replica's share of all samples of a step, scored or not; every rank must call it."""
    return exchange_samples(rollout, [list(range(sum(1 for _ in rollout.infos)))], options, topology)


def with_advantages(batch: Batch, groups: Sequence[Group], signal: Sequence[bool], options: AdvantageOptions) -> Batch:
    """The batch with advantages at the learned tokens, by sample or by step; those of a critic are added later."""
    if options.baseline == "critic":
        return batch
    if options.by_step:
        of_tokens = torch.cat([torch.zeros(0), *process_supervision(groups, options, batch.numbers.tolist())])
        return batch.with_(advantage=torch.zeros(len(batch.mask)).masked_scatter(batch.mask, of_tokens))
    advantages = step_advantages(groups, signal, options)
    return batch.with_(advantage=advantages[batch.numbers].repeat_interleave(batch.lengths) * batch.mask)


def batch_of_update(step: Step, mini_batch: MiniBatch, options: StepOptions, done: int) -> Batch:
    """This replica's share of a mini-batch of the step after `done` steps, with token weights over all samples that
    count in it."""
    assert step.batch is not None, "without a batch there are no mini-batches"
    lengths = [info.sampled for group in step.groups for info in group.infos]
    row = {number: i for i, number in enumerate(step.batch.numbers.tolist())}
    part = step.batch.select([row[i] for i in mini_batch.trained if i in row])
    counted = [lengths[i] for i in (*mini_batch.trained, *mini_batch.left_out)]
    longest = longest_completion(options.rollout, done)
    weight = token_weights(part.mask, part.cu_seqlens, options.algorithm.aggregation, longest, counted)
    return part.with_(weight=weight)


def longest_completion(rollout: RolloutConfig, step: int) -> int:
    """Largest number of tokens of a completion after `step` steps; it changes at `rollout.longer_from_step`."""
    longer, since = rollout.longer_max_new_tokens, rollout.longer_from_step
    return rollout.max_new_tokens if longer is None or since is None or step < since else longer


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


def loss_of(algorithm: AlgorithmConfig, old_is_current: bool) -> Loss:
    """The GRPO loss with these settings; see `grpo_loss` for `old_is_current`."""
    options = LossOptions(
        kind=algorithm.objective,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        tau_pos=algorithm.tau_pos,
        tau_neg=algorithm.tau_neg,
        vespo_k_pos=algorithm.vespo_k_pos,
        vespo_lambda_pos=algorithm.vespo_lambda_pos,
        vespo_k_neg=algorithm.vespo_k_neg,
        vespo_lambda_neg=algorithm.vespo_lambda_neg,
        off_policy_mask=algorithm.off_policy_mask,
        kl=algorithm.kl_estimator,
        kl_coef=algorithm.kl_coef if algorithm.kl_in == "loss" else 0.0,
        kl_unbiased=algorithm.kl_unbiased,
        entropy_coef=algorithm.entropy_coef,
        # A correction beyond single tokens is in the batch already (`corrected`): the loss must not apply it again.
        correction=algorithm.correction if correction_of(algorithm) is None else "none",
        correction_floor=algorithm.correction_floor,
        correction_cap=algorithm.correction_cap,
    )
    return grpo_loss(options, old_is_current, measures_kl=algorithm.kl_coef > 0)


def correction_of(algorithm: AlgorithmConfig) -> CorrectionOptions | None:
    """Options of a correction that needs whole sequences or the batch; None where the loss corrects token by token."""
    if not corrects_beyond_tokens(algorithm):
        return None
    return CorrectionOptions(
        kind=algorithm.correction,
        level=algorithm.correction_level,
        floor=algorithm.correction_floor,
        cap=algorithm.correction_cap,
        rejection_floor=algorithm.rejection_floor,
        rejection_cap=algorithm.rejection_cap,
        normalized=algorithm.correction_normalized,
    )


def corrected(batch: Batch, algorithm: AlgorithmConfig, topology: Topology) -> Batch:
    """The batch with the factors of `correction_of`, from its old log-probs; every rank must call it."""
    options = correction_of(algorithm)
    if options is None:
        return batch
    log_ratio = batch.old_logprob - batch.rollout_logprob
    factors = correction_factors(log_ratio, batch.mask, batch.cu_seqlens, options, topology.replicas)
    return batch.with_(correction=factors)


def correction_metrics(batch: Batch, algorithm: AlgorithmConfig, topology: Topology) -> Metrics:
    """Share of a step's tokens beyond a bound of `correction_of`; {} where the loss reports it for each update, or
    nothing is corrected. Every rank must call it."""
    options = correction_of(algorithm)
    if options is None or options.kind == "none":
        return {}
    log_ratio = batch.old_logprob - batch.rollout_logprob
    share = share_beyond(log_ratio, batch.mask, batch.cu_seqlens, options, topology.replicas)
    return {"policy/corrected": share}


def effective_samples(batch: Batch, algorithm: AlgorithmConfig, topology: Topology) -> float:
    """(sum w)^2 / (n * sum w^2) of the factors w by which a step's n learned tokens are corrected, over all replicas: 1
    when all are equal, 1 / n when one outweighs all others, 0 when all are 0. Every rank must call it."""
    factors = batch.correction
    if factors is None:  # the loss corrects token by token
        options = CorrectionOptions(
            algorithm.correction, floor=algorithm.correction_floor, cap=algorithm.correction_cap
        )
        factors = correction_factors(batch.old_logprob - batch.rollout_logprob, batch.mask, batch.cu_seqlens, options)
    learned = factors[batch.mask].double()
    sums = torch.stack([learned.sum(), learned.square().sum(), learned.new_tensor(len(learned))])
    if topology.replicas is not None:
        dist.all_reduce(sums, group=topology.replicas)
    total, squares, n = sums.tolist()
    return total**2 / (n * squares) if squares else 0.0


def penalised(batch: Batch, groups: Sequence[Group], options: StepOptions, topology: Topology) -> Batch:
    """The batch with a KL penalty in the rewards, if `kl_in` is reward (RLOO, arXiv 2402.14740).

    Advantages are those of rewards less `kl_coef` times log(old / reference) of the whole completion. With a critic,
    `ppo.token_rewards` penalises each token instead. Every rank must call it.
    """
    algorithm = options.algorithm
    if algorithm.kl_in != "reward" or algorithm.advantage_baseline == "critic":
        return batch
    log_ratio = torch.where(batch.mask, (batch.old_logprob - batch.ref_logprob).double(), 0.0)
    samples = torch.zeros(sum(len(group.infos) for group in groups), dtype=torch.float64)
    samples[batch.numbers] = torch.segment_reduce(log_ratio, "sum", offsets=batch.cu_seqlens, initial=0)
    if topology.replicas is not None:
        dist.all_reduce(samples, group=topology.replicas)
    penalties = iter((algorithm.kl_coef * samples).tolist())

    def less_penalty(info: SampleInfo) -> SampleInfo:
        return replace(info, score=replace(info.score, total=info.score.total - next(penalties)))

    groups = [replace(group, infos=tuple(map(less_penalty, group.infos))) for group in groups]
    # Penalties can tell equal rewards apart: these groups have signal where those of the step had none.
    return with_advantages(batch, groups, groups_with_signal(groups, options.advantages), options.advantages)
