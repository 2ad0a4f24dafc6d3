"""Seconds of the trainer's passes: forward, backward, pipeline, exchange of experts, reduction of gradients, optimizer.

A layer's seconds are counted operations and bytes over the rates of `hardware.Rates`; a stage takes as long as its
layers, and at least as long as the host needs to launch them. `models/schedule.py` itself fills the micro-batches. With
experts all replicas wait for each other in every layer, so a slot of the pipeline takes as long as its longest
micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb

from grpo_mega.config.derived import attention_on_gpu
from grpo_mega.forecast.planning.counting import Matrix, channels, keys_seen, layer_matrices, layer_ops, numbers
from grpo_mega.forecast.planning.hardware import Machines, Rates
from grpo_mega.forecast.planning.inventory import StageInventory
from grpo_mega.forecast.planning.memory import Trainer, layer_bytes, optimizer_state
from grpo_mega.models.schedule import cells_per_token, deal, fill

Parts = dict[str, float]
"""{what takes time: seconds}; they add up."""
GROUPS = 16
"""Number of groups of similar micro-batches; the time of each group's mean is computed once."""


@dataclass(frozen=True)
class Sequences:
    """The sequences of a pass.

    Attributes:
        lengths: Tokens of each sequence, with its prompt.
        prompts: Number of each sequence's prompt.
        prompt_tokens: Tokens of each sequence's prompt.
    """

    lengths: tuple[int, ...]
    prompts: tuple[int, ...]
    prompt_tokens: tuple[int, ...]


@dataclass(frozen=True)
class Micro:
    """A micro-batch.

    Attributes:
        tokens: Its rows, of all context parallel ranks together.
        keys: Tokens that a token attends to, on average over tokens and layers.
    """

    tokens: float
    keys: float


@dataclass(frozen=True)
class Slots:
    """A pass over sequences.

    Attributes:
        micros: Micro-batches of the replica with the most; the others wait for it.
        parts: Seconds of the slowest stage for all of them, and the pipeline's bubble.
        stage: Number of that stage.
    """

    micros: int
    parts: Parts
    stage: int

    @property
    def seconds(self) -> float:
        """Seconds of the pass."""
        return sum(self.parts.values())


def micro_batches(trainer: Trainer, work: Sequences, replicas: int) -> tuple[Micro, ...]:
    """The longest micro-batch of every slot, over the replicas, as `models/schedule.py` deals and fills them."""
    layout, model = trainer.layout, trainer.model
    cells = cells_per_token(layout.cp, attention_on_gpu(layout, model) == "padded")
    return _slots(work, replicas, layout.micro_batch_tokens, cells, (model.window, model.full_every))


# A search asks for the same micro-batches for hundreds of layouts.
@lru_cache
def _slots(
    work: Sequences, replicas: int, budget: int, cells: float, window: tuple[int | None, int]
) -> tuple[Micro, ...]:
    slots: list[Micro] = []
    columns = [*work.lengths], [*work.prompts], [*work.prompt_tokens]
    for share in deal(*columns, replicas, budget, cells):
        lengths, prompts, prompt_tokens = ([column[i] for i in share] for column in columns)
        micros = []
        for members in fill(lengths, prompts, prompt_tokens, budget, cells):
            tokens = [lengths[i] for i in members]
            # A prompt is computed once for all its sequences in a micro-batch.
            shared = {prompts[i]: prompt_tokens[i] for i in members}
            rows = sum(tokens) - sum(prompt_tokens[i] for i in members) + sum(shared.values())
            micros.append(Micro(rows, keys_seen(tokens, *window) * sum(tokens) / rows))
        # Replicas wait for each other slot by slot, so a slot takes as long as its longest micro-batch. Sorting aligns
        # micro-batches of similar size, and `passes` relies on it.
        micros.sort(key=lambda micro: -micro.tokens)
        for number, micro in enumerate(micros):
            if number == len(slots):
                slots.append(micro)
            elif micro.tokens > slots[number].tokens:
                slots[number] = micro
    return tuple(slots)


def _mean(micros: Sequence[Micro]) -> Micro:
    tokens = sum(micro.tokens for micro in micros)
    return Micro(tokens / len(micros), sum(micro.tokens * micro.keys for micro in micros) / tokens)


def layer_forward(trainer: Trainer, experts: bool, held: float, micro: Micro, machines: Machines) -> Parts:
    """Seconds of a layer's forward pass on a GPU that holds `held` elements of the layer's routed experts."""
    model, layout, gpu, rates = trainer.model, trainer.layout, machines.gpu, machines.rates
    ops = layer_ops(model, experts, trainer.lora)
    rows = micro.tokens / layout.cp
    mine = rows / layout.tp
    heads = model.heads if model.attention == "mla" else max(model.kv_heads, layout.tp)
    width = trainer.weight_bytes
    # Products of fp32 weights run in TF32, at half the rate of bf16.
    speed = gpu.flops if width == 2 else gpu.flops / 2
    attention, mlp, routed = layer_matrices(model, experts)
    gain = _gain_of_8_bits(attention + mlp, layout.tp, rates) if layout.fp8 else 1.0
    # `layer_bytes` wants a stage: this one has a single layer, of this kind.
    one_layer = StageInventory(1, int(experts), 0, 0, 0, 1, 1, 0, 0, {})
    parts = {
        "matrix products": mine * (ops.matmul + ops.adapters) / (gain * speed * rates.matmul),
        "attention": mine * ops.per_key * micro.keys / (speed * rates.attention),
        "single numbers": rates.traffic * layer_bytes(trainer, one_layer)[0] * rows / (gpu.memory * rates.memory),
        # Rows are gathered before and scattered after attention, and again around a dense or shared feed-forward layer.
        # What is gathered has 8 bits with `layout.fp8`, what is summed always 16: three quarters on average.
        "tensor parallel": (4 if not experts or model.moe.shared_ffn_hidden else 2)
        * (rows - mine)
        * model.hidden
        * (0.75 * width if layout.fp8 else width)
        / machines.link(layout.tp),
        # Keys and values from the other context parallel ranks.
        "context parallel": (layout.cp - 1)
        * rows
        * heads
        / layout.tp
        * sum(channels(model))
        * width
        / machines.link(layout.tp * layout.cp),
    }
    if experts:
        read = width * held / (gpu.memory * rates.memory)
        busiest = rates.imbalance if layout.ep > 1 else 1.0
        gain = _gain_of_8_bits(routed, layout.etp, rates) if layout.fp8 else 1.0
        # With few tokens for each expert, reading all experts' weights takes longer than the products.
        parts["routed experts"] = max(busiest * mine * ops.grouped / (gain * speed * rates.grouped), read)
        parts["exchange of experts"] = busiest * (1 - rates.hidden) * exchange(trainer, mine, machines)
        parts["waits for the host"] = rates.wait
    if layout.fp8:
        parts |= _narrowed(trainer, experts, held, mine, machines)
    return parts


def _gain_of_8_bits(matrices: list[Matrix], split: int, rates: Rates) -> float:
    """Speed of products with these matrices in 8 bits relative to 16 bits; `split` ranks share those that join.

    Twice, less the start and the end of each tile, which weigh more the fewer inputs there are. Backward passes are
    planned with the same gain.
    """
    in_16_bits, in_8_bits = (
        sum(m.size * (1 + depth * (split if m.joins else 1) / m.inputs) for m in matrices)
        for depth in (rates.depth / 2, rates.depth)
    )
    return 2 * in_16_bits / in_8_bits


def _narrowed(trainer: Trainer, experts: bool, held: float, tokens: float, machines: Machines) -> Parts:
    """Seconds in which the inputs of a layer's products are converted to 8 bits.

    Each element is read in 16 bits, and written in 8 bits twice, by rows and by columns. Weights are converted for
    every micro-batch.
    """
    model, rates = trainer.model, machines.rates
    attention, mlp, routed = layer_matrices(model, experts)
    dense = attention + mlp
    by_experts = rates.imbalance * model.moe.top_k * sum(matrix.inputs for matrix in routed)
    read = by_experts + sum(matrix.inputs for matrix in dense)
    weights = numbers(dense, trainer.layout.tp) + held
    bandwidth = machines.gpu.memory * rates.memory
    return {"to 8 bits": 4 * tokens * read / bandwidth, "weights to 8 bits": 4 * weights / bandwidth}


def exchange(trainer: Trainer, tokens: float, machines: Machines) -> float:
    """Seconds in which a GPU sends its tokens to their experts and receives the results.

    An all-to-all within and across machines at the same time, with a copy for every expert, or with DeepEP for every
    machine.
    """
    layout, model = trainer.layout, trainer.model
    once = machines.rates.once or layout.dispatch == "deepep"
    ranks = layout.ep * layout.etp
    near = min(ranks, machines.domain)
    size = 2 * tokens * layout.etp * model.hidden * trainer.weight_bytes  # there and back
    copies = model.moe.top_k * (ranks - near) / ranks
    if once:
        copies = min(copies, _machines_reached(trainer, ranks // near))
    inside = size * model.moe.top_k * (near - 1) / ranks / machines.link(near)
    if once:
        # The one copy that reaches a machine is passed on to all experts there.
        inside = size * model.moe.top_k * (near - 1) / near / machines.link(near)
    return max(inside, size * copies / machines.link(ranks))


def _machines_reached(trainer: Trainer, machines: int) -> float:
    """Mean number of other machines with experts of a token, when every expert is equally likely."""
    moe = trainer.model.moe
    missed = (1 - 1 / machines) ** moe.top_k
    # With groups of experts, a machine is missed when all chosen groups are on others.
    if moe.groups:
        here = moe.groups // machines
        missed = comb(moe.groups - here, moe.group_top_k) / comb(moe.groups, moe.group_top_k) if here else missed
    return (machines - 1) * (1 - missed)


def layer_backward(trainer: Trainer, forward: Parts) -> Parts:
    """Seconds of a layer's backward pass, with what it recomputes.

    Twice the products, for gradients of inputs and of weights; with adapters once, as the weights have no gradients.
    """
    again = {"none": (), "selective": ("attention",), "full": tuple({*forward} - {"waits for the host"})}[
        trainer.layout.recompute
    ]
    products = 1.0 if trainer.lora.rank else 2.0
    factors = {
        "matrix products": products,
        "routed experts": products,
        # Five products instead of two (Dao, 2023, FlashAttention-2, section 3).
        "attention": 2.5,
        "single numbers": 2.0,
        # The forward pass keeps the converted weights, and the number of each expert's tokens is known by then.
        "weights to 8 bits": 0.0,
        "waits for the host": 0.0,
        # Inputs are gathered once more for the gradients of weights.
        "tensor parallel": 1.5,
    }
    return {name: (factors.get(name, 1.0) + (name in again)) * seconds for name, seconds in forward.items()}


def stage_seconds(
    trainer: Trainer,
    stages: Sequence[StageInventory],
    number: int,
    micro: Micro,
    machines: Machines,
    training: bool,
    head: bool,
) -> Parts:
    """Seconds of a micro-batch on a GPU of a pipeline stage: forward, and with `training` backward.

    With `head` the last stage computes log-probs over the whole vocabulary.
    """
    stage, layout, rates = stages[number], trainer.layout, machines.rates
    # Log-probs need no prediction modules.
    predictors = stage.predictors if training else 0
    rows = micro.tokens / layout.cp / layout.tp
    parts: Parts = {}
    launches = 0.0
    for experts, layers in ((False, stage.layers - stage.moe_layers), (True, stage.moe_layers)):
        layers += predictors if experts == bool(trainer.model.moe.experts) else 0
        if not layers:
            continue
        held = stage.experts / max(stage.moe_layers + stage.predictors, 1)
        forward = layer_forward(trainer, experts, held, micro, machines)
        backward = layer_backward(trainer, forward) if training else {}
        for name, seconds in forward.items():
            parts[name] = parts.get(name, 0.0) + layers * (seconds + backward.get(name, 0.0))
        passes = (3.5 if layout.recompute == "full" else 2.5) if training else 1.0
        launches += layers * passes * (rates.expert_launches if experts else rates.dense_launches)
    if number == layout.pp - 1 and head:
        hidden, vocab = trainer.model.hidden, trainer.model.vocab_size or 0
        ops = 2 * hidden * vocab * (1 + predictors) + 4 * hidden**2 * predictors
        passes = (2 if trainer.lora.rank else 3) if training else 1
        parts["output layer"] = passes * rows * ops / (machines.gpu.flops * rates.matmul)
    if layout.pp > 1:
        sent = rows * trainer.model.hidden * trainer.weight_bytes * (2 if training else 1)
        parts["between stages"] = sent / (machines.gpu.network * rates.network)
    # The host launches while the GPU works, so launches cost only what exceeds the GPU's work.
    host = launches * rates.launch * (rates.narrowed if layout.fp8 else 1)
    return parts | {"launches": max(0.0, host - sum(parts.values()))}


def passes(
    trainer: Trainer,
    stages: Sequence[StageInventory],
    micros: Sequence[Micro],
    machines: Machines,
    training: bool,
    head: bool = True,
) -> Slots:
    """Seconds of a pass over micro-batches, forward, and with `training` backward.

    The pipeline's bubble is that of 1F1B, interleaved or not (Narayanan et al., 2021, arXiv 2104.04473, section 2.2).
    """
    layout = trainer.layout
    mean = _mean(micros)
    each = [
        sum(stage_seconds(trainer, stages, number, mean, machines, training, head).values())
        for number in range(layout.pp)
    ]
    slowest = each.index(max(each))
    total: Parts = {}
    size = -(-len(micros) // GROUPS)
    # Slots are sorted by size, so neighbours are similar and their mean stands for each.
    for at in range(0, len(micros), size):
        group = micros[at : at + size]
        for name, seconds in stage_seconds(trainer, stages, slowest, _mean(group), machines, training, head).items():
            total[name] = total.get(name, 0.0) + len(group) * seconds
    total["bubble"] = (layout.pp - 1) / layout.vpp * each[slowest]
    return Slots(len(micros), total, slowest)


def after_passes(trainer: Trainer, stage: StageInventory, machines: Machines, micro_seconds: float) -> Parts:
    """Seconds of an update after its passes: gradients are reduced, Adam moves the weights, the weights are gathered.

    With `optimizer.overlap` the passes of a micro-batch, `micro_seconds`, hide part of it.
    """
    layout, width, rates = trainer.layout, trainer.weight_bytes, machines.rates
    sharded = trainer.optimizer.distributed
    sent, moved = 0.0, 0.0
    for count, replicas, ranks in (
        (stage.trained_dense, stage.replicas, layout.tp * stage.replicas),
        (stage.trained_experts, stage.expert_replicas, layout.ep * layout.etp * stage.expert_replicas),
    ):
        if replicas > 1:
            # Gradients are reduced in fp32. A distributed optimizer scatters them and gathers the new weights; without
            # it an all-reduce sends them twice.
            size = (4 + width) * count if sharded else 8 * count
            sent += size * (replicas - 1) / replicas / machines.link(ranks)
        # Adam reads and writes its state, reads an fp32 gradient, and writes the weight.
        moved += (2 * trainer.state_bytes + 4 + width) * count / (replicas if sharded else 1)
    transferred = optimizer_state(trainer, stage) if trainer.optimizer.state.on_host else 0.0
    return {
        "reduction of gradients": max(0.0, sent - (micro_seconds if trainer.optimizer.overlap else 0.0)),
        "optimizer": moved / (machines.gpu.memory * rates.memory),
        "optimizer's state from main memory and back": 2 * transferred / (machines.gpu.host * rates.host),
        "around an update": rates.update,
    }
