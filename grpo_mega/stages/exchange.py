"""Moves samples from the ranks that hold them to the data parallel replicas that compute them, and packs them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from grpo_mega.config.derived import attention_on_gpu
from grpo_mega.config.schema import LayoutConfig, ModelConfig, RolloutConfig
from grpo_mega.models.schedule import cells_per_token, deal
from grpo_mega.models.topology import Topology
from grpo_mega.platform.collectives import exchange
from grpo_mega.types import Batch, Prompt, Rollout, Sample, Spans, pack_tokens


@dataclass(frozen=True)
class ExchangeOptions:
    """How samples are distributed over replicas, and which of their columns are sent.

    Attributes:
        budget: Tokens of a micro-batch.
        padded: Whether attention pads the sequences of a micro-batch to the longest, which changes what they cost.
        experts: (MoE layers, top k) of the routed experts that samples bring for routing replay; None without replay.
    """

    budget: int
    padded: bool = True
    experts: tuple[int, int] | None = None

    @classmethod
    def of(cls, layout: LayoutConfig, model: ModelConfig, rollout: RolloutConfig) -> ExchangeOptions:
        """The options of a run."""
        replayed = rollout.engine == "sglang" and rollout.sglang.routing_replay
        experts = (model.layers - model.moe.first_dense, model.moe.top_k) if replayed else None
        # A CPU may pad where a GPU does not: its replicas then get less even loads, and the same samples.
        return cls(layout.micro_batch_tokens, attention_on_gpu(layout, model) == "padded", experts)


@dataclass(frozen=True)
class PackedSample:
    """The part of a sample that a batch needs, as tensors.

    Attributes:
        prompt: Prompt of the completion.
        token_ids: [n] int32.
        logprobs: [n] float32.
        experts, given, restarts: See `Sample`.
    """

    prompt: Prompt
    token_ids: torch.Tensor
    logprobs: torch.Tensor
    experts: torch.Tensor | None = None
    given: Spans = ()
    restarts: tuple[int, ...] = ()

    @classmethod
    def of(cls, sample: Sample) -> PackedSample:
        """That part of a sample, with tensors that share the sample's memory."""
        token_ids = torch.from_numpy(np.asarray(sample.token_ids, np.int32))
        logprobs = torch.from_numpy(np.asarray(sample.logprobs, np.float32))
        return cls(sample.prompt, token_ids, logprobs, sample.experts, sample.given, sample.restarts)


def exchange_samples(
    rollout: Rollout, parts: Sequence[Sequence[int]], options: ExchangeOptions, topology: Topology
) -> Batch:
    """Exchanges samples and packs those that this replica computes; every rank must call it.

    `parts` are lists of sample numbers, such as mini-batches; each is distributed evenly over the replicas.
    """
    prompts = [group.prompt for group in rollout.groups for _ in group.infos]
    infos, experts = list(rollout.infos), options.experts
    assigned = assign_samples(rollout, parts, options, topology)
    mine = assigned[topology.dp_rank]
    leaving = [[PackedSample.of(rollout.samples[i]) for i in numbers if i in rollout.samples] for numbers in assigned]
    # Every sender goes through its samples in ascending order, and `exchange` returns the senders' parts by rank.
    arriving = sorted(mine, key=lambda i: (infos[i].holder, i))
    sources = [infos[i].holder for i in arriving]
    shapes: list[tuple[int, ...]] = [(infos[i].length,) for i in arriving]
    token_ids = _column([[c.token_ids for c in part] for part in leaving], torch.int32, sources, shapes, topology)
    logprobs = _column([[c.logprobs for c in part] for part in leaving], torch.float32, sources, shapes, topology)
    chosen: list[torch.Tensor | None] = [None] * len(arriving)
    if experts:
        shapes = [(len(prompts[i].token_ids) + infos[i].length - 1, *experts) for i in arriving]
        columns = [[_experts_or_unknown(c, experts) for c in part] for part in leaving]
        received = _column(columns, torch.int16, sources, shapes, topology)
        chosen = [part if (part >= 0).any() else None for part in received]
    given, restarts = [infos[i].given for i in arriving], [infos[i].restarts for i in arriving]
    columns_of = dict(zip(arriving, zip(token_ids, logprobs, chosen, given, restarts, strict=True), strict=True))
    prompt_numbers = number_prompts(rollout, experts is not None)
    completions = [PackedSample(prompts[number], *columns_of[number]) for number in mine]
    return pack(completions, mine, [prompt_numbers[number] for number in mine])


def assign_samples(
    rollout: Rollout, parts: Sequence[Sequence[int]], options: ExchangeOptions, topology: Topology
) -> list[list[int]]:
    """Numbers of the samples that each replica computes, ascending.

    A sample stays on one replica for the whole step. Each of `parts`, the mini-batches of the first epoch, is
    distributed evenly; mini-batches of later epochs, which are shuffled again, only on average.
    """
    prompts = [group.prompt.token_ids for group in rollout.groups for _ in group.infos]
    prompt_numbers, infos = number_prompts(rollout, options.experts is not None), list(rollout.infos)
    assigned: list[list[int]] = [[] for _ in range(topology.dp_size)]
    assert len({i for part in parts for i in part}) == sum(map(len, parts)), "a sample is in two parts"
    for part in parts:
        lengths = [len(prompts[i]) + infos[i].length for i in part]
        of_prompt, shared = [prompt_numbers[i] for i in part], [len(prompts[i]) for i in part]
        cells = cells_per_token(topology.cp_size, options.padded)
        pieces = [1 + len(infos[i].restarts) for i in part]
        dealt = deal(lengths, of_prompt, shared, topology.dp_size, options.budget, cells, pieces)
        for of_replica, indices in zip(assigned, dealt, strict=True):
            of_replica += [part[i] for i in indices]
    return [sorted(of_replica) for of_replica in assigned]


def _column(
    leaving: Sequence[Sequence[torch.Tensor]],
    dtype: torch.dtype,
    sources: Sequence[int],
    shapes: Sequence[tuple[int, ...]],
    topology: Topology,
) -> list[torch.Tensor]:
    """Sends this rank's tensors, listed by replica; returns those arriving from ranks `sources`, with these shapes."""
    of_replica = [torch.cat([torch.empty(0, dtype=dtype), *(part.flatten() for part in parts)]) for parts in leaving]
    sizes = [0] * topology.world_size
    for source, shape in zip(sources, shapes, strict=True):
        sizes[source] += math.prod(shape)
    received = exchange([of_replica[replica] for replica in topology.replica_of_rank], sizes)
    parts = received.split([math.prod(shape) for shape in shapes]) if shapes else ()
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _experts_or_unknown(completion: PackedSample, experts: tuple[int, int]) -> torch.Tensor:
    """The experts of a completion; -1 everywhere when the engine did not return them, as for aborted samples."""
    if completion.experts is not None:
        return completion.experts
    tokens = len(completion.prompt.token_ids) + len(completion.token_ids) - 1
    return torch.full((tokens, *experts), -1, dtype=torch.int16)


def number_prompts(rollout: Rollout, replayed: bool) -> list[int]:
    """The number of each sample's prompt, from 0 in the order of appearance. Samples may share a prompt's computation.

    Equal prompts have the same number; with experts to be `replayed`, only if the same weights read them last, because
    others may have chosen other experts.
    """
    keys = [
        (group.prompt.token_ids, info.segments[-1][1] if replayed else None)
        for group in rollout.groups
        for info in group.infos
    ]
    return _numbered(keys)


def _numbered(keys: Sequence[Hashable]) -> list[int]:
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [numbers[key] for key in keys]


def pack_samples(samples: Sequence[Sample]) -> Batch:
    """Packs samples that are all on this rank, numbered from 0 in order, as is each distinct prompt."""
    prompt_numbers = _numbered([sample.prompt.token_ids for sample in samples])
    return pack([PackedSample.of(sample) for sample in samples], range(len(samples)), prompt_numbers)


def pack(completions: Sequence[PackedSample], numbers: Sequence[int], prompt_numbers: Sequence[int]) -> Batch:
    """Packs completions with their prompts, which may be shared; sampled tokens are masked in, with rollout log-probs.

    `numbers` are the numbers of the sequences in the global batch, `prompt_numbers` those of their prompts, so that
    parts packed on several replicas can be joined again.
    """
    prompts = [completion.prompt.token_ids for completion in completions]
    lengths = [len(prompt) for prompt in prompts]
    whole = [
        np.concatenate([np.asarray(prompt, np.int32), completion.token_ids.numpy()])
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    batch = pack_tokens(whole, lengths)
    rollout_logprob = torch.zeros(len(batch.tokens))
    rollout_logprob[batch.mask] = torch.cat([torch.zeros(0), *(completion.logprobs for completion in completions)])
    for completion, start, length in zip(completions, batch.cu_seqlens.tolist(), lengths, strict=False):
        for first, end in completion.given:
            batch.mask[start + length + first : start + length + end] = False
    batch = batch.with_(
        restarts=_packed_restarts(completions, batch),
        rollout_logprob=rollout_logprob,
        numbers=torch.tensor(numbers, dtype=torch.int64),
        prompts=torch.tensor(prompt_numbers, dtype=torch.int64),
        prompt_lengths=torch.tensor(lengths, dtype=torch.int64),
    )
    return batch.with_(experts=_packed_experts([completion.experts for completion in completions], batch))


def _packed_restarts(completions: Sequence[PackedSample], batch: Batch) -> torch.Tensor | None:
    """[T] bool, see `TokenColumns`; None when no sample has a restart."""
    if not any(completion.restarts for completion in completions):
        return None
    packed = torch.zeros_like(batch.mask)
    for completion, start in zip(completions, batch.cu_seqlens.tolist(), strict=False):
        for restart in completion.restarts:
            packed[start + len(completion.prompt.token_ids) + restart] = True
    return packed


def _packed_experts(experts: Sequence[torch.Tensor | None], batch: Batch) -> torch.Tensor | None:
    """[T, MoE layers, top k] experts of all tokens, -1 where unknown; None when no sample has any."""
    known = [of_sample for of_sample in experts if of_sample is not None]
    if not known:
        return None
    packed = torch.full((len(batch.tokens), *known[0].shape[1:]), -1, dtype=torch.int16)
    first: dict[int, torch.Tensor] = {}
    starts, prompts, lengths = (x.tolist() for x in (batch.cu_seqlens[:-1], batch.prompts, batch.prompt_lengths))
    for of_sample, prompt, length in zip(experts, prompts, lengths, strict=True):
        # Of a sample with restarts the prompt's experts are not known.
        if of_sample is not None and (of_sample[:length] >= 0).all():
            first.setdefault(prompt, of_sample[:length])
    for of_sample, start, prompt, length in zip(experts, starts, prompts, lengths, strict=True):
        if of_sample is not None:
            packed[start : start + len(of_sample)] = of_sample
            # A prompt may be computed once for all its samples, so all of them route it as the first one did.
            packed[start : start + length] = first.get(prompt, of_sample[:length])
    return packed
