"""Seconds of the trainer's passes: forward, backward, pipeline, exchange of experts, reduction of gradients, optimizer.

A layer's seconds are counted operations and bytes over what `hardware.Rates` says that others reached; a stage's those
of its layers, and never less than the host takes to launch them. Micro-batches are made by `models/schedule.py` itself,
of sampled lengths. With experts all replicas wait for each other in every layer, so a slot of the pipeline takes as
long as the longest micro-batch in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb

from grpo_mega.config.attention import attention_on_gpu
from grpo_mega.config.schema import Config
from grpo_mega.forecast.planning.counting import Matrix, channels, keys_seen, layer_ops, met_matrices, numbers
from grpo_mega.forecast.planning.hardware import Machines, Rates
from grpo_mega.forecast.planning.inventory import StageInventory
from grpo_mega.forecast.planning.memory import layer_bytes, state, state_bytes, weight_bytes
from grpo_mega.models.schedule import cells_per_token, deal, fill

Parts = dict[str, float]
"""{what takes time: seconds}; they add up."""
GROUPS = 16
"""Groups of micro-batches of about the same size whose times are computed once each."""


@dataclass(frozen=True)
class Sequences:
    """What a pass computes.

    Attributes:
        lengths: Tokens of every sequence, its prompt included.
        prompts: Which prompt each has.
        prompt_tokens: Tokens of the prompt of each.
    """

    lengths: tuple[int, ...]
    prompts: tuple[int, ...]
    prompt_tokens: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of all sequences, prompts counted as often as they come."""
        return sum(self.lengths)


@dataclass(frozen=True)
class Micro:
    """A micro-batch.

    Attributes:
        tokens: Its rows, context parallel ranks together.
        keys: Tokens that a token looks at, on average over tokens and layers.
    """

    tokens: float
    keys: float


@dataclass(frozen=True)
class Slots:
    """A pass over sequences.

    Attributes:
        micros: Micro-batches of the replica with the most; every other waits for it.
        parts: Seconds of the slowest stage in all of them, the pipeline's bubble apart.
        stage: Which stage that is.
    """

    micros: int
    parts: Parts
    stage: int

    @property
    def seconds(self) -> float:
        """Seconds of the pass."""
        return sum(self.parts.values())


def micro_batches(config: Config, work: Sequences, replicas: int) -> tuple[Micro, ...]:
    """The longest micro-batch of every slot, over the replicas, as `models/schedule.py` deals and fills them."""
    layout, model = config.layout, config.model
    cells = cells_per_token(layout.cp, attention_on_gpu(layout, model) == "padded")
    window = (model.window, model.full_every)
    return _slots(work, replicas, layout.micro_batch_tokens, cells, window)


@lru_cache  # a search asks for the same ones again and again
def _slots(
    work: Sequences, replicas: int, budget: int, cells: float, window: tuple[int | None, int]
) -> tuple[Micro, ...]:
    slots: list[Micro] = []
    lengths, prompts, given = [*work.lengths], [*work.prompts], [*work.prompt_tokens]
    for share in deal(lengths, prompts, given, replicas, budget, cells):
        own = [[values[i] for i in share] for values in (lengths, prompts, given)]
        filled = fill(own[0], own[1], own[2], budget, cells)
        micros = sorted((_micro(own, members, window) for members in filled), key=lambda micro: -micro.tokens)
        for number, micro in enumerate(micros):
            if number == len(slots):
                slots.append(micro)
            elif micro.tokens > slots[number].tokens:
                slots[number] = micro
    return tuple(slots)


def _micro(own: list[list[int]], members: list[int], window: tuple[int | None, int]) -> Micro:
    lengths, prompts, given = ([values[i] for i in members] for values in own)
    first = dict(zip(prompts, given, strict=True))
    rows = sum(lengths) - sum(given) + sum(first.values())  # a prompt is computed once
    return Micro(rows, keys_seen(lengths, *window) * sum(lengths) / rows)


def _alike(micros: Sequence[Micro]) -> list[tuple[Micro, int]]:
    """The micro-batches in a few groups of about the same size: their means, and how many there are."""
    size = -(-len(micros) // GROUPS)
    groups = [micros[at : at + size] for at in range(0, len(micros), size)]
    return [(_mean(group), len(group)) for group in groups]


def _mean(micros: Sequence[Micro]) -> Micro:
    tokens = sum(micro.tokens for micro in micros)
    return Micro(tokens / len(micros), sum(micro.tokens * micro.keys for micro in micros) / tokens)


def layer_forward(config: Config, experts: bool, held: float, micro: Micro, machines: Machines) -> Parts:
    """Seconds of a layer's forward pass on a GPU, of which routed experts hold `held` numbers."""
    model, layout, gpu, rates = config.model, config.layout, machines.gpu, machines.rates
    ops = layer_ops(model, experts, config.lora)
    rows = micro.tokens / layout.cp
    mine = rows / layout.tp
    width = weight_bytes(config)
    speed = gpu.flops if width == 2 else gpu.flops / 2  # TF32
    dense, routed = met_matrices(model, experts)
    gain = _gain_of_8_bits(dense, layout.tp, rates) if layout.fp8 else 1.0
    kinds = StageInventory(1, int(experts), 0, 0, 0, 1, 1, 0, 0, {})
    parts = {
        "matrix products": mine * (ops.matmul + ops.adapters) / (gain * speed * rates.matmul),
        "attention": mine * ops.per_key * micro.keys / (speed * rates.attention),
        "single numbers": rates.traffic * layer_bytes(config, kinds)[0] * rows / (gpu.memory * rates.memory),
        "tensor parallel": (4 if not experts or model.moe.shared_ffn_hidden else 2)
        * (rows - mine)
        * model.hidden
        * (0.75 * width if layout.fp8 else width)  # what is gathered has 8 bits, what is summed 16
        / machines.link(layout.tp),
        "context parallel": _gathered(config, rows) / machines.link(layout.tp * layout.cp),
    }
    if experts:
        read = width * held / (gpu.memory * rates.memory)
        busiest = rates.imbalance if layout.ep > 1 else 1.0
        gain = _gain_of_8_bits(routed, layout.etp, rates) if layout.fp8 else 1.0
        parts["routed experts"] = max(busiest * mine * ops.grouped / (gain * speed * rates.grouped), read)
        parts["exchange of experts"] = busiest * (1 - rates.hidden) * exchange(config, mine, machines)
        parts["waits for the host"] = rates.wait
    if layout.fp8:
        parts |= _narrowed(config, experts, held, mine, machines)
    return parts


def _gain_of_8_bits(matrices: list[Matrix], split: int, rates: Rates) -> float:
    """How many times as fast products with these matrices are in 8 bits as in 16: twice, less what tiles take to start
    and end, which weighs more the fewer inputs there are. `split` ranks share the matrices that join; backward passes
    are planned with the same gain."""

    def seconds(depth: float) -> float:
        return sum(m.size * (1 + depth * (split if m.joins else 1) / m.inputs) for m in matrices)

    return 2 * seconds(rates.depth / 2) / seconds(rates.depth)


def _narrowed(config: Config, experts: bool, held: float, tokens: float, machines: Machines) -> Parts:
    """Seconds in which a layer's products get what they read in 8 bits: 16 bits of a number are read, and 8 of it
    written twice, by rows and by columns. Weights are narrowed for every micro-batch."""
    model, rates = config.model, machines.rates
    dense, routed = met_matrices(model, experts)
    by_experts = rates.imbalance * model.moe.top_k * sum(matrix.inputs for matrix in routed)
    read = by_experts + sum(matrix.inputs for matrix in dense)
    weights = numbers(dense, config.layout.tp) + held
    bandwidth = machines.gpu.memory * rates.memory
    return {"to 8 bits": 4 * tokens * read / bandwidth, "weights to 8 bits": 4 * weights / bandwidth}


def exchange(config: Config, tokens: float, machines: Machines) -> float:
    """Seconds in which a GPU sends its tokens to their experts and gets them back: an all-to-all within machines and
    across at the same time, with a copy for every expert, or with DeepEP for every machine."""
    layout, model = config.layout, config.model
    once = machines.rates.once or layout.dispatch == "deepep"
    ranks = layout.ep * layout.etp
    near = min(ranks, machines.domain)
    size = 2 * tokens * layout.etp * model.hidden * weight_bytes(config)  # there and back
    copies = model.moe.top_k * (ranks - near) / ranks
    if once:
        copies = min(copies, _machines_reached(config, ranks // near))
    inside = size * model.moe.top_k * (near - 1) / ranks / machines.link(near)
    if once:
        inside = size * model.moe.top_k * (near - 1) / near / machines.link(near)  # what has crossed is passed on
    return max(inside, size * copies / machines.link(ranks))


def _machines_reached(config: Config, machines: int) -> float:
    """Other machines that a token's experts are on, on average, when every expert is as likely as any other."""
    moe = config.model.moe
    missed = (1 - 1 / machines) ** moe.top_k
    if moe.groups:  # a machine is missed when all groups that are chosen are elsewhere
        here = moe.groups // machines
        missed = comb(moe.groups - here, moe.group_top_k) / comb(moe.groups, moe.group_top_k) if here else missed
    return (machines - 1) * (1 - missed)


def _gathered(config: Config, rows: float) -> float:
    """Bytes of keys and values that a GPU gets from the other context parallel ranks, in a layer."""
    model, layout = config.model, config.layout
    heads = model.heads if model.attention == "mla" else max(model.kv_heads, layout.tp)
    return (layout.cp - 1) * rows * heads / layout.tp * sum(channels(model)) * weight_bytes(config)


def layer_backward(config: Config, forward: Parts) -> Parts:
    """Seconds of a layer's backward pass: twice the products, for gradients of inputs and of weights; with adapters the
    weights have none. What is recomputed comes again; how many tokens each expert has is known by then."""
    again = {"none": (), "selective": ("attention",), "full": tuple({*forward} - {"waits for the host"})}[
        config.layout.recompute
    ]
    products = 1.0 if config.lora.rank else 2.0
    factors = {
        "matrix products": products,
        "routed experts": products,
        "attention": 2.5,  # five products instead of two (Dao, 2023, FlashAttention-2, section 3)
        "single numbers": 2.0,
        "weights to 8 bits": 0.0,  # they are kept for it
        "waits for the host": 0.0,
        "tensor parallel": 1.5,  # inputs are gathered once more for the gradients of weights
    }
    return {name: (factors.get(name, 1.0) + (name in again)) * seconds for name, seconds in forward.items()}


def stage_seconds(
    config: Config,
    stages: Sequence[StageInventory],
    number: int,
    micro: Micro,
    machines: Machines,
    training: bool,
    head: bool,
) -> Parts:
    """Seconds that a micro-batch takes on a GPU of a pipeline stage: forward, and with `training` backward.

    `head` says whether the last stage computes log-probs of a whole vocabulary.
    """
    stage, layout, rates = stages[number], config.layout, machines.rates
    ahead = stage.predictors if training else 0  # log-probs need no prediction modules
    parts: Parts = {}
    launches = 0.0
    for experts, layers in ((False, stage.layers - stage.moe_layers), (True, stage.moe_layers)):
        layers += ahead if experts == bool(config.model.moe.experts) else 0
        if not layers:
            continue
        held = stage.experts / max(stage.moe_layers + stage.predictors, 1)
        forward = layer_forward(config, experts, held, micro, machines)
        backward = layer_backward(config, forward) if training else {}
        for name, seconds in forward.items():
            parts[name] = parts.get(name, 0.0) + layers * (seconds + backward.get(name, 0.0))
        passes = (3.5 if layout.recompute == "full" else 2.5) if training else 1.0
        launches += layers * passes * (rates.expert_launches if experts else rates.dense_launches)
    if number == layout.pp - 1 and head:
        parts["output layer"] = _output(config, micro, machines, training, ahead)
    if layout.pp > 1:
        rows = micro.tokens / layout.cp / layout.tp
        sent = rows * config.model.hidden * weight_bytes(config) * (2 if training else 1)
        parts["between stages"] = sent / (machines.gpu.network * rates.network)
    host = launches * rates.launch * (rates.narrowed if layout.fp8 else 1)
    return parts | {"launches": max(0.0, host - sum(parts.values()))}


def _output(config: Config, micro: Micro, machines: Machines, training: bool, predictors: int) -> float:
    """Seconds of the output layer, and of the prediction modules' use of it."""
    model, layout = config.model, config.layout
    rows = micro.tokens / layout.cp / layout.tp
    ops = 2 * model.hidden * (model.vocab_size or 0) * (1 + predictors) + 4 * model.hidden**2 * predictors
    passes = (2 if config.lora.rank else 3) if training else 1
    return passes * rows * ops / (machines.gpu.flops * machines.rates.matmul)


def passes(
    config: Config,
    stages: Sequence[StageInventory],
    micros: Sequence[Micro],
    machines: Machines,
    training: bool,
    head: bool = True,
) -> Slots:
    """Seconds of a pass over micro-batches, forward, and with `training` backward.

    The pipeline's bubble is that of 1F1B, interleaved or not (Narayanan et al., 2021, arXiv 2104.04473, section 2.2).
    """
    layout = config.layout
    mean = _mean(micros)
    each = [
        sum(stage_seconds(config, stages, number, mean, machines, training, head).values())
        for number in range(layout.pp)
    ]
    slowest = each.index(max(each))
    total: Parts = {}
    for micro, count in _alike(micros):
        for name, seconds in stage_seconds(config, stages, slowest, micro, machines, training, head).items():
            total[name] = total.get(name, 0.0) + count * seconds
    total["bubble"] = (layout.pp - 1) / layout.vpp * each[slowest]
    return Slots(len(micros), total, slowest)


def after_passes(config: Config, stage: StageInventory, machines: Machines, micro_seconds: float) -> Parts:
    """Seconds of an update after its passes: gradients are reduced, Adam moves the weights, these are gathered.

    With `optimizer.overlap` what a micro-batch's passes take is hidden.
    """
    layout, width, rates = config.layout, weight_bytes(config), machines.rates
    sharded = config.optimizer.distributed
    sent, moved = 0.0, 0.0
    for count, replicas, ranks in (
        (stage.trained_dense, stage.replicas, layout.tp * stage.replicas),
        (stage.trained_experts, stage.expert_replicas, layout.ep * layout.etp * stage.expert_replicas),
    ):
        if replicas > 1:
            size = (4 + width) * count if sharded else 8 * count  # reduced in fp32
            sent += size * (replicas - 1) / replicas / machines.link(ranks)
        moved += (2 * state_bytes(config) + 4 + width) * count / (replicas if sharded else 1)
    passing = state(config, stage) if config.optimizer.state.on_host else 0.0
    return {
        "reduction of gradients": max(0.0, sent - (micro_seconds if config.optimizer.overlap else 0.0)),
        "optimizer": moved / (machines.gpu.memory * rates.memory),
        "optimizer's state from main memory and back": 2 * passing / (machines.gpu.host * rates.host),
        "around an update": rates.update,
    }
