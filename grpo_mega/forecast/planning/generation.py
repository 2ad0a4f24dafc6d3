"""Seconds of generation: assumed lengths of completions, an engine's step from the bytes it reads, simulated engines.

A step of an engine decodes one token of every running sequence; its seconds depend on how many run and how long they
are. The simulation moves from event to event: a sequence ends, the KV cache overflows, a waiting sequence begins.
Between two events only steps of known length happen. So waves, overflow and the tail follow from the lengths.

Lengths of completions have long tails: most are short, a few reach the limit. A log-normal distribution cut at the
limit has both. Its mean is the one number that a plan cannot know.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from operator import attrgetter
from statistics import NormalDist
from typing import NamedTuple

from grpo_mega.config.schema import LayoutConfig, ModelConfig, RolloutConfig, SGLangConfig
from grpo_mega.errors import InputError
from grpo_mega.forecast.planning.counting import channels, dense_layers, token_ops
from grpo_mega.forecast.planning.hardware import Machines
from grpo_mega.rollout.sglang import memory as engine_memory
from grpo_mega.rollout.sglang.arguments import attention_copies

SHARE = 0.3
"""Assumed mean length over the longest allowed."""
SPREAD = 0.7
"""Assumed standard deviation of the logarithm of a length; most publications give means only."""
RESERVED = 400
"""Tokens of room that every running sequence needs before another begins: SGLang's schedule_policy.py reserves at least
a tenth of up to 4,096 tokens to come."""


@cache
def completion_lengths(count: int, mean: float, longest: int, spread: float = SPREAD) -> tuple[int, ...]:
    """Lengths of `count` completions, at least 1 and at most `longest`, with this mean; the same every time.

    They are quantiles of a log-normal distribution cut at the limit, in an order that mixes long and short: any two
    neighbours, and every k-th length, are spread over the whole distribution.

    Raises:
        InputError: The mean is not between 1 and the limit.
    """
    # Not `mean < 1 or mean > longest`, which would let NaN pass.
    if not 1 <= mean <= longest:
        raise InputError(
            f"completions of {mean:g} tokens on average",
            f"not between 1 and the longest allowed, {longest}",
            "choose another --completion-tokens, or raise rollout.max_new_tokens",
        )
    normal = NormalDist()
    quantiles = [normal.inv_cdf((number + 0.5) / count) for number in range(count)]

    def at(scale: float) -> list[float]:
        return [min(float(longest), max(1.0, math.exp(scale + spread * z))) for z in quantiles]

    # The cut at the limit leaves no formula for the scale that has this mean; bisection finds it.
    low, high = -20.0, math.log(longest) + 10 * spread
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(at(middle)) / count < mean else (low, middle)
    lengths = [min(longest, max(1, round(length))) for length in at(high)]
    # Steps of about the golden ratio visit each number once and spread any few consecutive visits evenly.
    step = max(1, round(count * (math.sqrt(5) - 1) / 2))
    while math.gcd(step, count) > 1:
        step += 1
    return tuple(lengths[number * step % count] for number in range(count))


@dataclass(frozen=True)
class Decoder:
    """The speed of an engine: seconds of a step = fixed + bytes and messages that grow with the running sequences.

    Attributes:
        dense: Bytes of weights that each GPU reads in every step.
        experts: Bytes of routed experts on each GPU.
        chosen: Share of a layer's experts that one token is sent to; 0 without experts.
        per_key: Bytes of cache per token, on each GPU that holds it.
        caches: Ranks of data parallel attention, among which sequences and their cache are split.
        memory: Bytes read per second.
        per_sequence: Seconds of computation per running sequence; it overlaps with reading.
        fixed: Seconds of a step on the host, and of messages regardless of their size.
        message: Seconds of messages per running sequence.
        prompt_token: Seconds of computation per token of a prompt.
        accepted: Tokens that a step adds to a sequence.
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
        """Seconds of a step with `running` sequences, which hold `held` tokens together."""
        # Share of the experts that at least one of the sequences has chosen, if all experts are equally likely. Only
        # their weights are read.
        touched = 1 - (1 - self.chosen) ** running
        read = (self.dense + self.experts * touched + held / self.caches * self.per_key) / self.memory
        return max(read, running * self.per_sequence) + self.fixed + running * self.message


@dataclass(frozen=True)
class EngineSet:
    """The engines of a run, which are alike.

    Attributes:
        count: Number of engines.
        decoder: How fast a step of each is.
        prompt: Tokens of a prompt.
        room: Tokens that the caches of each hold, together.
        most: Sequences that may run at once in each.
    """

    count: int
    decoder: Decoder
    prompt: float
    room: float
    most: int


@dataclass
class Generated:
    """The outcome of an engine's sequences.

    Attributes:
        seconds: Time until the last one ended.
        tokens: Tokens sampled.
        read: Tokens of prompts, and of completions that were read again.
        evicted: Times that a sequence lost its cache to others, and was read again later.
        waves: Number of sequences over `most`.
        most: Most sequences that ran at once.
        ends: Seconds at which each sequence ended, ascending.
    """

    seconds: float = 0.0
    tokens: int = 0
    read: float = 0.0
    evicted: int = 0
    waves: float = 1.0
    most: int = 0
    ends: list[float] = field(default_factory=list)


class _Running(NamedTuple):
    """A running sequence; ordered by the step of the engine at which it ends.

    A tuple, because a heap compares thousands of them: dataclasses take ten times as long.

    Attributes:
        ends: Step at which it ends.
        number: Place in the order of arrival.
        begun: Step at which it began.
        held: Tokens of its completion at that step.
    """

    ends: float
    number: int
    begun: float
    held: int


@dataclass
class SimulatedEngine:
    """An engine between two events.

    Attributes:
        decoder, prompt, room, most: See `simulate`.
        lengths: Tokens of the completion of each sequence, by number.
        waiting: (number, tokens of its completion so far) of sequences that wait, in the order in which they begin.
        now: Steps so far.
        held: Tokens in its cache.
    """

    decoder: Decoder
    prompt: float
    room: float
    most: int
    lengths: list[int] = field(default_factory=list)
    waiting: deque[tuple[int, int]] = field(default_factory=deque)
    running: list[_Running] = field(default_factory=list)
    now: float = 0.0
    held: float = 0.0
    result: Generated = field(default_factory=Generated)

    @property
    def busy(self) -> bool:
        """Whether sequences wait or run."""
        return bool(self.waiting or self.running)

    def submit(self, length: int, begun: int = 0) -> int:
        """Submits a sequence with a completion of this length, of which it has the first `begun` tokens.

        Returns:
            Its number.

        Raises:
            InputError: The cache has no room for it, even alone.
        """
        if length + self.prompt > self.room:
            raise InputError(
                f"a sequence of {length + self.prompt:,.0f} tokens",
                f"an engine's KV cache holds {self.room:,.0f} tokens",
                "raise rollout.sglang.tp, or lower rollout.max_new_tokens",
            )
        self.lengths.append(length)
        self.waiting.append((len(self.lengths) - 1, begun))
        self.result.tokens += length - begun
        return len(self.lengths) - 1

    def next_ended(self) -> list[int]:
        """The numbers of the next sequences that end."""
        ended: list[int] = []
        while not ended:
            self._begin()
            ended = self._run()
        return ended

    def _begin(self) -> None:
        """Waiting sequences begin, in the order of arrival, while there is room. The first always does, so simulations
        make progress. All read their prompt; one that was evicted or goes on reads what it has generated again."""
        waiting, running, lengths, result = self.waiting, self.running, self.lengths, self.result
        while waiting and len(running) < self.most:
            number, done = waiting[0]
            if running and self.held + self.prompt + done + RESERVED * (len(running) + 1) > self.room:
                break
            waiting.popleft()
            ends = self.now + (lengths[number] - done) / self.decoder.accepted
            heapq.heappush(running, _Running(ends, number, self.now, done))
            self.held += self.prompt + done
            result.seconds += (self.prompt + done) * self.decoder.prompt_token
            result.read += self.prompt + done
        result.most = max(result.most, len(running))

    def _run(self) -> list[int]:
        """All sequences run until one ends or the cache is full; returns the numbers of those that have ended."""
        running, result, accepted = self.running, self.result, self.decoder.accepted
        count, growth = len(running), accepted * len(running)
        until_end = running[0].ends - self.now
        until_full = (self.room - self.held) / growth
        steps = min(until_end, max(until_full, 0.0))
        # The cache grows evenly, so its mean size gives the seconds.
        result.seconds += steps * self.decoder.step(count, self.held + growth * steps / 2)
        self.now, self.held = self.now + steps, self.held + growth * steps
        ended: list[int] = []
        # A sequence alone has room until its end, as `submit` checks; a rounding error must not evict it.
        if until_end <= until_full or count == 1:
            while running and running[0].ends <= self.now + 1e-9:
                ended.append(heapq.heappop(running).number)
                self.held -= self.prompt + self.lengths[ended[-1]]
                result.ends.append(result.seconds)
            return ended
        # The cache is full: the sequence that arrived last makes room and waits, before all others.
        last = max(running, key=attrgetter("number"))
        running.remove(last)
        heapq.heapify(running)
        held = last.held + (self.now - last.begun) * accepted
        self.held -= self.prompt + held
        self.waiting.appendleft((last.number, int(held)))
        result.evicted += 1
        return ended


def simulate(
    decoder: Decoder,
    lengths: Sequence[int],
    prompt: float,
    room: float,
    most: int,
    after: Mapping[int, Sequence[int]] | None = None,
) -> Generated:
    """Simulates an engine that generates completions of these lengths.

    Args:
        decoder: How fast a step is.
        lengths: Tokens of every completion, in the order in which they begin.
        prompt: Tokens of a prompt.
        room: Tokens that the engine's caches hold, together.
        most: Sequences that may run at once.
        after: {number of a sequence: numbers of later ones that are submitted when it has ended}; see `draws`.

    Raises:
        InputError: The caches have no room for the longest sequence alone.
    """
    after = after or {}
    later = {number for numbers in after.values() for number in numbers}
    engine = SimulatedEngine(decoder, prompt, room, most)
    # Number in the engine -> number here.
    submitted = {engine.submit(length): number for number, length in enumerate(lengths) if number not in later}
    while engine.busy:
        for ended in engine.next_ended():
            for number in after.get(submitted[ended], ()):
                submitted[engine.submit(lengths[number])] = number
    engine.result.waves = len(lengths) / engine.result.most
    return engine.result


def draws(lengths: Sequence[int], first: int, size: int) -> dict[int, range]:
    """{number of a completion: numbers of completions that are submitted when it has ended}: refill in one engine.

    Completions after the `first` ones belong to prompts that replace groups without signal, evenly spread. Neighbours
    are a group, which ends with its longest completion.

    Args:
        lengths: Tokens of every completion.
        first: Number of completions submitted at the start.
        size: Completions of a group.
    """
    bounds = [*range(0, first, size), *range(first, len(lengths), size), len(lengths)]
    groups = [range(start, end) for start, end in pairwise(bounds)]
    at_first = -(-first // size)
    further = groups[at_first:]
    replaced = [groups[number * len(groups) // len(further)] for number in range(len(further))]
    return {max(old, key=lengths.__getitem__): new for old, new in zip(replaced, further, strict=True)}


def decoder_of(
    rollout: RolloutConfig, model: ModelConfig, layout: LayoutConfig, vocab_size: int, machines: Machines
) -> Decoder:
    """The speed of one of the run's engines."""
    if rollout.engine == "embedded":
        return _embedded(model, layout, vocab_size, machines)
    sglang, gpu, rates = rollout.sglang, machines.gpu, machines.rates
    tp, caches = sglang.tp, attention_copies(sglang)
    held = engine_memory.weights(model, sglang, vocab_size)
    drafts = "speculative_algorithm" in sglang.arguments
    operations = token_ops(model, vocab_size, keys=0)
    speed = gpu.flops * (2 if sglang.fp8 else 1) * rates.decode_matmul
    fixed, message = _messages(model, sglang, machines)
    return Decoder(
        dense=held["other weights"],
        experts=held["routed experts"],
        chosen=model.moe.top_k / model.moe.experts if model.moe.experts else 0.0,
        per_key=engine_memory.cache_bytes(model, sglang),
        caches=caches,
        memory=gpu.memory * rates.decode_memory,
        per_sequence=operations / tp / speed,
        fixed=rates.decode_host + (rates.draft if drafts else 0.0) + fixed,
        message=message,
        prompt_token=operations / tp / speed,
        accepted=rates.accepted if drafts else 1.0,
    )


def _messages(model: ModelConfig, sglang: SGLangConfig, machines: Machines) -> tuple[float, float]:
    """Seconds of a step's messages between the GPUs of an engine: fixed, and per running sequence.

    Two all-reduces per layer. With data parallel attention one, among the GPUs of an attention rank, and the tokens of
    all ranks are gathered before the experts and summed after them; with DeepEP tokens go only to their experts.
    """
    rates = machines.rates
    tp, caches = sglang.tp, attention_copies(sglang)
    shared = tp // caches
    row = 2.0 * model.hidden
    dense = dense_layers(model)
    moe_layers = model.layers - dense

    def reduce(ranks: int, rows: float) -> tuple[float, float]:
        """The same of an all-reduce with `rows` rows per running sequence."""
        if ranks == 1:
            return 0.0, 0.0
        latency = rates.reduce_inside if ranks <= machines.domain else rates.reduce_across
        return latency, 2 * rows * row * (ranks - 1) / ranks / machines.link(ranks)

    if caches == 1:
        latency, each = reduce(tp, 1.0)
        return 2 * model.layers * latency, 2 * model.layers * each
    of_attention, of_experts = reduce(shared, 1 / caches), reduce(tp, 1.0)
    if sglang.arguments.get("moe_a2a_backend", "none") == "deepep":
        # Rows go to the experts in fp8, which is half a row in bf16, and come back in bf16.
        sent = model.moe.top_k * 1.5 * row / tp / rates.deepep_network
        fixed = model.layers * of_attention[0] + moe_layers * rates.deepep
        return fixed, model.layers * of_attention[1] + moe_layers * sent
    fixed = model.layers * (of_attention[0] + 2 * of_experts[0])
    return fixed, model.layers * (of_attention[1] + of_experts[1])


def _embedded(model: ModelConfig, layout: LayoutConfig, vocab_size: int, machines: Machines) -> Decoder:
    """The embedded engine: the trainer's layers over the ranks of a replica, bound by launches on the host."""
    gpu, rates = machines.gpu, machines.rates
    ranks = layout.tp * layout.pp * layout.cp
    launches = dense_layers(model) * rates.dense_launches
    launches += (model.layers - dense_layers(model)) * rates.expert_launches
    operations = token_ops(model, vocab_size, keys=0)
    width = 2.0 if model.dtype == "bf16" else 4.0
    # Latent keys and values are kept as each head reads them, after their up-projection.
    keys = (model.heads if model.attention == "mla" else model.kv_heads) * sum(channels(model))
    return Decoder(
        # A weight takes two operations per token, so half the operations are the weights read; of the experts, those
        # that one sequence chooses.
        dense=width / 2 * operations / layout.tp,
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
