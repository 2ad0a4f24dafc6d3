"""Corrections from log-probs before a step's updates: factors for the engine's mismatch, KL penalties in rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from grpo_mega.algorithm.correction import CorrectionOptions, correction_factors, share_beyond
from grpo_mega.config.passes import corrects_beyond_tokens
from grpo_mega.config.schema import AlgorithmConfig, Config
from grpo_mega.models.topology import Topology
from grpo_mega.run import Metrics
from grpo_mega.stages.batches import with_advantages
from grpo_mega.types import Answer, Batch, Group


def correction_of(algorithm: AlgorithmConfig) -> CorrectionOptions | None:
    """Options of a correction that needs whole sequences or the batch; None where the loss corrects each token by
    itself."""
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
    """Metrics of the tokens of a step beyond a bound of `correction_of`; {} where the loss reports it for each update,
    or there is no correction. Every rank must call it."""
    options = correction_of(algorithm)
    if options is None or options.kind == "none":
        return {}
    log_ratio = batch.old_logprob - batch.rollout_logprob
    share = share_beyond(log_ratio, batch.mask, batch.cu_seqlens, options, topology.replicas)
    return {"policy/corrected": share}


def penalised(batch: Batch, groups: Sequence[Group], config: Config, topology: Topology) -> Batch:
    """The batch with a KL penalty in the rewards, if `kl_in` is reward (RLOO, arXiv 2402.14740).

    Advantages are those of rewards less `kl_coef` times log(old / reference) of the whole completion. With a critic,
    `ppo.token_rewards` penalises each token instead. Every rank must call it.
    """
    if config.algorithm.kl_in != "reward" or config.algorithm.advantage_baseline == "critic":
        return batch
    log_ratio = torch.where(batch.mask, (batch.old_logprob - batch.ref_logprob).double(), 0.0)
    samples = torch.zeros(sum(len(group.answers) for group in groups), dtype=torch.float64)
    samples[batch.numbers] = torch.segment_reduce(log_ratio, "sum", offsets=batch.cu_seqlens, initial=0)
    if topology.replicas is not None:
        dist.all_reduce(samples, group=topology.replicas)
    penalties = iter((config.algorithm.kl_coef * samples).tolist())
    less = [replace(group, answers=tuple(_less(a, next(penalties)) for a in group.answers)) for group in groups]
    return with_advantages(batch, less, config)


def _less(answer: Answer, penalty: float) -> Answer:
    """The answer with its reward reduced by the penalty."""
    return replace(answer, score=replace(answer.score, total=answer.score.total - penalty))
