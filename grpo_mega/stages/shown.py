"""Samples that a run writes to samples/: whole groups of a step, with the per-token numbers of the updates.

The choice of groups depends on seed, step and answers, which every rank has, and is the same under every layout. Texts
come from the ranks that hold the samples, numbers from the replicas that compute them; only those of shown samples are
sent to the main rank.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor

from grpo_mega.algorithm.step_advantages import groups_with_signal
from grpo_mega.checkpoint.step_in_progress import StepInProgress
from grpo_mega.config.schema import Config
from grpo_mega.models.topology import Topology
from grpo_mega.observe.samples import rounded, sample_record
from grpo_mega.platform.collectives import on_main_rank
from grpo_mega.stages.batches import advantage_options
from grpo_mega.step_ends import Decode
from grpo_mega.types import Batch, Group, Rollout


def chosen_groups(groups: Sequence[Group], config: Config, step: int) -> list[int]:
    """Indices of the groups of a step to show, ascending: drawn at random, preferring groups with signal.

    The draw depends only on the seed, the step and the signal of groups, so a repeated step draws the same.
    """
    signal = groups_with_signal(groups, advantage_options(config))
    order = [*range(len(groups))]
    random.Random(f"{config.run.seed}/shown/{step}").shuffle(order)
    order.sort(key=lambda group: not signal[group])
    return sorted(order[: config.run.sample_groups_per_step])


def records_of(rollout: Rollout, chosen: Sequence[int], decode: Decode) -> list[dict[str, Any]]:
    """Records of all samples of these groups, in their order, in the format of samples/, before any update.

    Every rank must call it, with the same groups. The records are on the main rank, the others get [].
    """
    if not chosen:
        return []
    numbers = sample_numbers(rollout.groups, chosen)

    def held_here() -> dict[int, dict[str, Any]]:
        records = {}
        for group, (index, of_group) in enumerate(zip(chosen, numbers, strict=True)):
            for number, answer in zip(of_group, rollout.groups[index].answers, strict=True):
                if number in rollout.samples:
                    records[number] = sample_record(rollout.samples[number], answer.score, group, decode)
        return records

    found = {number: record for of_rank in on_main_rank(held_here) for number, record in of_rank.items()}
    return [found[number] for of_group in numbers for number in of_group] if found else []


def with_numbers(current: StepInProgress, config: Config, topology: Topology) -> list[dict[str, Any]]:
    """Records of a finished step, with the advantages and the log-probs under every policy.

    Records of samples that no update computed are unchanged. An advantage is one number per sample, or a list if tokens
    have their own (critic, process supervision, teacher). Every rank must call it; the records are on the main rank.
    """
    batch = current.batch
    if batch is None:
        return current.shown
    columns = {"old_logprobs": batch.old_logprob, "advantages": batch.advantage}
    if batch.new_logprob is not None and batch.new_entropy is not None:
        columns |= {"new_logprobs": batch.new_logprob, "entropies": batch.new_entropy}
    if config.algorithm.kl_coef:
        columns["ref_logprobs"] = batch.ref_logprob
    options = advantage_options(config)
    by_token = options.by_step or options.baseline == "critic" or config.distill.teacher is not None
    found = _found(current, batch, columns, topology)
    return [_joined(record, values, by_token) for record, values in zip(current.shown, found, strict=True)]


def with_old_logprobs(current: StepInProgress, batch: Batch, topology: Topology) -> list[dict[str, Any]]:
    """Records of a step without updates, with the log-probs that its mismatch is measured by, from `batch`, which has
    all samples of the step. Every rank must call it; the records are on the main rank."""
    found = _found(current, batch, {"old_logprobs": batch.old_logprob}, topology)
    return [_joined(record, values, by_token=True) for record, values in zip(current.shown, found, strict=True)]


def sample_numbers(groups: Sequence[Group], chosen: Sequence[int]) -> list[range]:
    """Numbers, in the rollout, of the samples of each chosen group."""
    ends = [*accumulate(len(group.answers) for group in groups)]
    return [range(ends[index] - len(groups[index].answers), ends[index]) for index in chosen]


def _found(
    current: StepInProgress, batch: Batch, columns: Mapping[str, Tensor], topology: Topology
) -> list[dict[str, list[float]]]:
    """For each record {column: values at the completion's tokens}, {} for a sample in no replica's batch. On the main
    rank; [] on others, and if nothing is shown."""
    numbers = [number for of_group in sample_numbers(current.groups, current.shown_groups) for number in of_group]
    if not numbers:
        return [{} for _ in current.shown]
    mine = {*numbers} if topology.is_first_of_replica else set()
    found = on_main_rank(lambda: _values(batch, columns, mine))
    of_sample = {number: values for of_rank in found for number, values in of_rank.items()}
    return [of_sample.get(number, {}) for number in numbers] if topology.is_main else []


def _values(batch: Batch, columns: Mapping[str, Tensor], numbers: set[int]) -> dict[int, dict[str, list[float]]]:
    """{number: {column: values at the completion's tokens}} of those samples that are in the batch."""
    starts = batch.cu_seqlens.tolist()
    parts = {number: slice(starts[i], starts[i + 1]) for i, number in enumerate(batch.numbers.tolist())}
    return {
        number: {name: column[part][batch.mask[part]].tolist() for name, column in columns.items()}
        for number, part in parts.items()
        if number in numbers
    }


def _joined(record: dict[str, Any], values: Mapping[str, list[float]], by_token: bool) -> dict[str, Any]:
    """The record with these values; unless `by_token`, all tokens have the same advantage, and one number is stored."""
    lists: dict[str, Any] = {name: rounded(of_tokens) for name, of_tokens in values.items()}
    if "advantages" not in lists:
        return record | lists
    if by_token:
        return {name: value for name, value in record.items() if name != "advantage"} | lists
    del lists["advantages"]
    return record | {"advantage": next(iter(values["advantages"]), None)} | lists
