"""Seconds of generation: a step of an engine from the bytes that it reads, and engines simulated event by event.

An engine decodes one token of every running sequence in a step, whose seconds depend on how many run and how long they
are. The simulation goes from event to event: a sequence ends, the KV cache overflows, one that waited begins. Nothing
happens between two events but steps of a length that is known. So waves, overflow and the tail come out of the lengths.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from grpo_mega.config.schema import Config
from grpo_mega.forecast.planning.counting import dense_layers, token_ops
from grpo_mega.forecast.planning.hardware import Machines
from grpo_mega.rollout.sglang import memory as engine_memory
from grpo_mega.rollout.sglang.arguments import attention_copies

RESERVED = 400
"""Tokens of room that a running sequence has to have before another begins: SGLang's schedule_policy.py counts at
least a tenth of up to 4,096 tokens to come."""


@dataclass(frozen=True)
class Decoder:
    """The speed of an engine: seconds of a step = fixed + bytes and messages that grow with what runs.

    Attributes:
        dense: Bytes of weights that each GPU reads in every step.
        experts: Bytes of routed experts on each GPU.
        chosen: Share of the experts of a layer that one token is sent to; 0 without experts.
        per_key: Bytes of cache for a token, on each GPU that has it.
        caches: Ranks of data parallel attention, among which sequences and their cache are split.
        memory: Bytes per second that are read.
        per_sequence: Seconds of computation for each running sequence; reading hides it, or it hides reading.
        fixed: Seconds of a step on the host, and of messages whatever they carry.
        message: Seconds of messages for each running sequence.
        prompt_token: Seconds of computation for each token of a prompt.
        accepted: Tokens of a sequence that a step brings.
    """

    dense: float
    experts: float
    chosen: float
    per_key: float
    caches: int
    memory: float
    per_sequence: float
    fixed: float
    message: float
    prompt_token: float
    accepted: float = 1.0

    def step(self, running: float, held: float) -> float:
        """Seconds of a step with so many running sequences, which hold so many tokens together."""
        touched = 1 - (1 - self.chosen) ** running
        read = (self.dense + self.experts * touched + held / self.caches * self.per_key) / self.memory
        return max(read, running * self.per_sequence) + self.fixed + running * self.message


@dataclass
class Generated:
    """What became of an engine's sequences.

    Attributes:
        seconds: Until the last ended.
        tokens: That were sampled.
        evicted: How often a sequence lost its cache to others, and was read again later.
        waves: Times that every place was filled, at least 1: sequences over the most that ran at once.
        most: Sequences that ran at once at most.
        ends: Seconds at which a sequence ended, ascending.
    """

    seconds: float = 0.0
    tokens: int = 0
    evicted: int = 0
    waves: float = 1.0
    most: int = 0
    ends: list[float] = field(default_factory=list)


class _Running(NamedTuple):
    """A sequence that runs; ordered by the step of the engine at which it ends.

    A tuple, as a step's thousands are compared often: dataclasses take ten times as long.

    Attributes:
        ends: That step.
        number: Its place in the order of arrival.
        begun: Step at which it began, with `held` tokens then.
    """

    ends: float
    number: int
    begun: float
    held: int


def simulate(
    decoder: Decoder,
    lengths: Sequence[int],
    prompt: float,
    room: float,
    most: int,
    after: Mapping[int, Sequence[int]] | None = None,
) -> Generated:
    """Generates sequences of these lengths, behind prompts of `prompt` tokens each, in an engine.

    Args:
        decoder: How fast a step is.
        lengths: Tokens of every answer, in the order in which they begin.
        prompt: Tokens of a prompt.
        room: Tokens that the engine's caches hold, together.
        most: Sequences that may run at once.
        after: {number of a sequence: numbers of later ones that are submitted when it has ended}; see `draws`.

    Raises:
        ValueError: The caches have no room for the longest sequence alone.
    """
    if max(lengths) + prompt > room:
        raise ValueError(f"a sequence of {max(lengths) + prompt:,.0f} tokens has no room in a cache of {room:,.0f}")
    after = after or {}
    later = {number for numbers in after.values() for number in numbers}
    result, waiting = Generated(), deque((number, 0) for number in range(len(lengths)) if number not in later)
    running: list[_Running] = []
    now, held = 0.0, 0.0  # in steps of the engine; tokens in its cache
    while waiting or running:
        while waiting and len(running) < most:
            number, done = waiting[0]
            if running and held + prompt + done + RESERVED * (len(running) + 1) > room:
                break
            waiting.popleft()
            ends = now + (lengths[number] - done) / decoder.accepted
            heapq.heappush(running, _Running(ends, number, now, done))
            held += prompt + done
            result.seconds += (prompt + done) * decoder.prompt_token
        result.most = max(result.most, len(running))
        count, growth = len(running), decoder.accepted * len(running)
        until_end = running[0].ends - now
        until_full = (room - held) / growth
        steps = min(until_end, max(until_full, 0.0))
        result.seconds += steps * decoder.step(count, held + growth * steps / 2)
        now, held = now + steps, held + growth * steps
        if until_end <= until_full or count == 1:
            while running and running[0].ends <= now + 1e-9:
                ended = heapq.heappop(running)
                held -= prompt + lengths[ended.number]
                result.tokens += lengths[ended.number]
                result.ends.append(result.seconds)
                waiting.extend((number, 0) for number in after.get(ended.number, ()))
        else:  # the one that came last makes room, and is read again
            last = max(running, key=attrgetter("number"))
            running.remove(last)
            heapq.heapify(running)
            done = int(last.held + (now - last.begun) * decoder.accepted)
            held -= prompt + last.held + (now - last.begun) * decoder.accepted
            waiting.appendleft((last.number, done))
            result.evicted += 1
    result.waves = len(lengths) / result.most
    return result


def draws(lengths: Sequence[int], first: int, size: int) -> dict[int, range]:
    """{number of an answer: numbers of those that are submitted when it has ended}: refill, in one engine.

    The answers beyond the `first` ones are of prompts in the place of others, whose groups are without signal: as many
    groups as there are further ones, evenly spread. Neighbours are a group, which ends with its longest answer.

    Args:
        lengths: Tokens of every answer.
        first: Number of answers that are submitted at the beginning.
        size: Answers of a group.
    """
    bounds = [*range(0, first, size), *range(first, len(lengths), size), len(lengths)]
    groups = [range(start, end) for start, end in pairwise(bounds)]
    at_first = -(-first // size)
    further = groups[at_first:]
    replaced = [groups[number * len(groups) // len(further)] for number in range(len(further))]
    return {max(old, key=lengths.__getitem__): new for old, new in zip(replaced, further, strict=True)}


def decoder_of(config: Config, vocab_size: int, machines: Machines) -> Decoder:
    """The speed of one of the run's engines; of the embedded one, as a layer's launches take on the host."""
    if config.rollout.engine == "embedded":
        return _embedded(config, vocab_size, machines)
    model, sglang, gpu, rates = config.model, config.rollout.sglang, machines.gpu, machines.rates
    tp, caches = sglang.tp, attention_copies(sglang)
    held = engine_memory.weights(config.model, config.rollout.sglang, vocab_size)
    drafts = "speculative_algorithm" in sglang.arguments
    operations = token_ops(model, vocab_size, keys=0)
    speed = gpu.flops * (2 if sglang.fp8 else 1) * rates.decode_matmul
    fixed, message = _messages(config, machines)
    return Decoder(
        dense=held["other weights"],
        experts=held["routed experts"],
        chosen=model.moe.top_k / model.moe.experts if model.moe.experts else 0.0,
        per_key=engine_memory.cache_bytes(config.model, config.rollout.sglang),
        caches=caches,
        memory=gpu.memory * rates.decode_memory,
        per_sequence=operations / tp / speed,
        fixed=rates.decode_host + (rates.draft if drafts else 0.0) + fixed,
        message=message,
        prompt_token=operations / tp / speed,
        accepted=rates.accepted if drafts else 1.0,
    )


def _messages(config: Config, machines: Machines) -> tuple[float, float]:
    """Seconds of a step's messages between the GPUs of an engine: whatever they carry, and for each running sequence.

    Two all-reduces a layer. With data parallel attention one among the GPUs of a rank of it, and tokens of all are
    gathered for the experts and summed after them; with DeepEP these go to their experts alone.
    """
    model, sglang, rates = config.model, config.rollout.sglang, machines.rates
    tp, caches = sglang.tp, attention_copies(sglang)
    shared = tp // caches
    row = 2.0 * model.hidden
    dense = dense_layers(model)
    moe_layers = model.layers - dense

    def reduce(ranks: int, rows: float) -> tuple[float, float]:
        """Of an all-reduce of so many rows for each running sequence."""
        if ranks == 1:
            return 0.0, 0.0
        latency = rates.reduce_inside if ranks <= machines.domain else rates.reduce_across
        return latency, 2 * rows * row * (ranks - 1) / ranks / machines.link(ranks)

    if caches == 1:
        latency, each = reduce(tp, 1.0)
        return 2 * model.layers * latency, 2 * model.layers * each
    of_attention, of_experts = reduce(shared, 1 / caches), reduce(tp, 1.0)
    if sglang.arguments.get("moe_a2a_backend", "none") == "deepep":
        sent = model.moe.top_k * 1.5 * row / tp / rates.deepep_network  # in fp8 to the experts, in bf16 back
        fixed = model.layers * of_attention[0] + moe_layers * rates.deepep
        return fixed, model.layers * of_attention[1] + moe_layers * sent
    fixed = model.layers * (of_attention[0] + 2 * of_experts[0])
    return fixed, model.layers * (of_attention[1] + of_experts[1])


def _embedded(config: Config, vocab_size: int, machines: Machines) -> Decoder:
    """The embedded engine: training's own layers, launched one by one, over the ranks of a replica."""
    model, layout, gpu, rates = config.model, config.layout, machines.gpu, machines.rates
    ranks = layout.tp * layout.pp * layout.cp
    launches = dense_layers(model) * rates.dense_launches
    launches += (model.layers - dense_layers(model)) * rates.expert_launches
    operations = token_ops(model, vocab_size, keys=0)
    width = 2.0 if model.dtype == "bf16" else 4.0
    keys = 2 * model.kv_heads * (model.head_dim or model.hidden // model.heads)
    if model.attention == "mla":
        keys = model.heads * (model.mla.qk_head_dim + model.mla.qk_rope_dim + model.mla.v_head_dim)
    return Decoder(
        dense=width / 2 * operations / layout.tp,  # of a model with experts those of one sequence
        experts=0.0,
        chosen=0.0,
        per_key=width * model.layers * keys / layout.tp,
        caches=1,
        memory=gpu.memory * rates.decode_memory,
        per_sequence=operations / ranks / (gpu.flops * rates.decode_matmul),
        fixed=rates.decode_host + launches * rates.launch,
        message=0.0,
        prompt_token=operations / ranks / (gpu.flops * rates.decode_matmul),
    )
