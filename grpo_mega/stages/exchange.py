"""Sends samples from the ranks that hold them to the data parallel replicas that compute them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from grpo_mega.config.attention import attention_on_gpu
from grpo_mega.config.schema import Config
from grpo_mega.models.schedule import cells_per_token, deal
from grpo_mega.models.topology import Topology
from grpo_mega.platform.collectives import exchange
from grpo_mega.stages.packing import PackedAnswer, number_prompts, pack
from grpo_mega.types import Batch, Prompt, Rollout


def exchange_samples(rollout: Rollout, parts: Sequence[Sequence[int]], config: Config, topology: Topology) -> Batch:
    """Exchanges samples and packs those that this replica computes; every rank must call it.

    `parts` are lists of sample numbers, such as mini-batches; each is distributed evenly over the replicas.
    """
    prompts = [group.prompt for group in rollout.groups for _ in group.answers]
    padded = attention_on_gpu(config.layout, config.model) == "padded"  # on a CPU it may be, and the load less even
    assigned = assign_samples(rollout, parts, config.layout.micro_batch_tokens, topology, padded)
    moe, replayed = config.model.moe, config.rollout.engine == "sglang" and config.rollout.sglang.routing_replay
    experts = (config.model.layers - moe.first_dense, moe.top_k) if replayed else None
    completions = _exchanged(rollout, prompts, assigned, topology, experts)
    numbers = assigned[topology.dp_rank]
    number_of = number_prompts([prompt.token_ids for prompt in prompts])
    return pack([completions[number] for number in numbers], numbers, number_of)


def assign_samples(
    rollout: Rollout, parts: Sequence[Sequence[int]], budget: int, topology: Topology, padded: bool = True
) -> list[list[int]]:
    """Numbers of the samples that each replica computes, ascending.

    A sample stays on one replica for the whole step. Each of `parts`, the mini-batches of the first epoch, is
    distributed evenly; mini-batches of later epochs, which are shuffled again, only on average.
    """
    prompts = [group.prompt.token_ids for group in rollout.groups for _ in group.answers]
    number, answers = number_prompts(prompts), list(rollout.answers)
    assigned: list[list[int]] = [[] for _ in range(topology.dp_size)]
    assert len({i for part in parts for i in part}) == sum(map(len, parts)), "a sample is in two parts"
    for part in parts:
        lengths = [len(prompts[i]) + answers[i].length for i in part]
        of_prompt, shared = [number[prompts[i]] for i in part], [len(prompts[i]) for i in part]
        dealt = deal(lengths, of_prompt, shared, topology.dp_size, budget, cells_per_token(topology.cp_size, padded))
        for of_replica, indices in zip(assigned, dealt, strict=True):
            of_replica += [part[i] for i in indices]
    return [sorted(of_replica) for of_replica in assigned]


def _exchanged(
    rollout: Rollout,
    prompts: Sequence[Prompt],
    assigned: Sequence[Sequence[int]],
    topology: Topology,
    experts: tuple[int, int] | None,
) -> dict[int, PackedAnswer]:
    """Exchanges completions; returns those that this replica computes, by number.

    `experts` is (MoE layers, top k) if samples have experts for routing replay, else None.
    """
    answers = list(rollout.answers)
    leaving = [[PackedAnswer.of(rollout.samples[i]) for i in numbers if i in rollout.samples] for numbers in assigned]
    arriving = sorted(assigned[topology.dp_rank], key=lambda i: (answers[i].holder, i))  # in the order of sending
    sources = [answers[i].holder for i in arriving]
    shapes: list[tuple[int, ...]] = [(answers[i].length,) for i in arriving]
    token_ids = _column([[c.token_ids for c in part] for part in leaving], torch.int32, sources, shapes, topology)
    logprobs = _column([[c.logprobs for c in part] for part in leaving], torch.float32, sources, shapes, topology)
    chosen: list[torch.Tensor | None] = [None] * len(arriving)
    if experts:
        shapes = [(len(prompts[i].token_ids) + answers[i].length - 1, *experts) for i in arriving]
        parts = [[_experts_or_unknown(c, experts) for c in part] for part in leaving]
        received = _column(parts, torch.int16, sources, shapes, topology)
        chosen = [part if (part >= 0).all() else None for part in received]
    columns = zip(token_ids, logprobs, chosen, strict=True)
    return {i: PackedAnswer(prompts[i], *of_sample) for i, of_sample in zip(arriving, columns, strict=True)}


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


def _experts_or_unknown(completion: PackedAnswer, experts: tuple[int, int]) -> torch.Tensor:
    """The experts of a completion; -1 everywhere when the engine did not return them, as for aborted samples."""
    if completion.experts is not None:
        return completion.experts
    tokens = len(completion.prompt.token_ids) + len(completion.token_ids) - 1
    return torch.full((tokens, *experts), -1, dtype=torch.int16)
