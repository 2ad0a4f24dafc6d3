"""From groups of scored answers to the mini-batches that updates compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from grpo_mega.algorithm.advantage import group_advantages, has_signal
from grpo_mega.algorithm.mini_batches import Share, deal
from grpo_mega.algorithm.weights import token_weights
from grpo_mega.checkpoint.step_in_progress import StepInProgress
from grpo_mega.config.schema import AlgorithmConfig, Config, RolloutConfig
from grpo_mega.types import Batch, Group, pack


def make_batch(groups: Sequence[Group], algorithm: AlgorithmConfig) -> Batch | None:
    """Packs the samples that updates compute, with their advantages; None when there is none."""
    trained, _ = chosen(groups, algorithm)
    if not trained:
        return None
    std = algorithm.advantage_std
    advantages = [group_advantages(torch.tensor(g.rewards, dtype=torch.float64), std) for g in groups]
    samples = [sample for group in groups for sample in group.samples]
    batch = pack([samples[i] for i in trained])
    advantage = torch.cat(advantages)[trained].repeat_interleave(batch.lengths)
    return batch.with_(advantage=advantage * batch.mask)


def chosen(groups: Sequence[Group], algorithm: AlgorithmConfig) -> tuple[list[int], list[int]]:
    """Numbers of the samples that updates compute, and of those that count in their denominators.

    A group without signal has advantage 0 everywhere. By equation 3 of DeepSeekMath its samples count all the same, and
    the KL term, like an entropy bonus, moves them; where there is neither, they have no gradient and are not computed.
    """
    signal = [has_signal(group.rewards) for group in groups for _ in group.samples]
    with_signal, everyone = [i for i, has in enumerate(signal) if has], list(range(len(signal)))
    if algorithm.groups_without_signal == "drop":
        return with_signal, with_signal
    return (everyone if algorithm.kl_coef or algorithm.entropy_coef else with_signal), everyone


def mini_batches(now: StepInProgress, config: Config, step: int) -> Iterator[Batch]:
    """The batch of a step cut into its updates, epoch after epoch, but for those that are done.

    Each has its weights over all samples that count in it.
    """
    batch, algorithm = now.batch, config.algorithm
    if batch is None:
        return
    row = {sample: i for i, sample in enumerate(chosen(now.groups, algorithm)[0])}
    tokens = [len(sample.token_ids) for group in now.groups for sample in group.samples]
    longest = longest_completion(config.rollout, step)
    for share in shares(now.groups, config, step)[len(now.updates) :]:
        part = batch.select([row[i] for i in share.trained])
        left_out = [tokens[i] for i in share.left_out]
        yield part.with_(weight=token_weights(part.mask, part.cu_seqlens, algorithm.aggregation, longest, left_out))


def longest_completion(rollout: RolloutConfig, step: int) -> int:
    """How many tokens a completion may have after so many steps: more from `rollout.longer_from_step` on."""
    longer, since = rollout.longer_max_new_tokens, rollout.longer_from_step
    return rollout.max_new_tokens if longer is None or since is None or step < since else longer


def shares(groups: Sequence[Group], config: Config, step: int) -> list[Share]:
    """The samples of every mini-batch of a step, epoch after epoch; the same whenever it is asked for."""
    trained, counted = chosen(groups, config.algorithm)
    seeds = [f"{config.run.seed}/mini-batches/{step}/{epoch}" for epoch in range(config.algorithm.epochs)]
    return [share for seed in seeds for share in deal(counted, trained, config.algorithm.mini_batches, seed)]
