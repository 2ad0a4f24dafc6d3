"""How many bytes of a GPU training takes: exact for weights, gradients and optimizer, estimated for the rest.

The estimate assumes attention that never holds its matrix of scores, and sequence parallelism where there is tensor
parallelism. Where attention has a table, micro-batches are as skewed as schedule.py lets them be: one long sequence,
and short ones in a table as wide. Lines of the result add up to the peak of the trainer's turn on the device.
"""

from __future__ import annotations

from dataclasses import replace

from grpo_kernels.chunked import BLOCK_GPU
from grpo_mega.config.attention import attention_on_gpu, key_channels
from grpo_mega.config.schema import REWARD_MODELS, Config, LayoutConfig, ModelConfig, MoEConfig
from grpo_mega.forecast.planning.deepep import deepep_bytes
from grpo_mega.forecast.planning.inventory import Role, StageInventory, elements
from grpo_mega.forecast.planning.lines import ASLEEP, DEEPEP, EXPORTS, LIBRARIES
from grpo_mega.models.body import head_channels
from grpo_mega.models.families import layers_of
from grpo_mega.models.megatron.sinks import CHANNELS
from grpo_mega.models.schedule import cells_per_token
from grpo_mega.rollout.sglang.memory import ENGINE_ASLEEP, FIXED
from grpo_mega.weights.merging import merged_bytes
from grpo_mega.weights.stream import FILE_BYTES

MAY_BE_PLANNED = 0.92
"""Share of a GPU's memory; the rest is lost to fragments."""
IMBALANCE = 1.5
"""Tokens of the busiest rank's experts over the average."""
RUN = 512
"""Tokens of an average run of a micro-batch, for FlashAttention-2: it has room for 128 rows more of each."""


def memory(config: Config, roles: list[Role], number: int, vocab_size: int) -> dict[str, float]:
    """{what: bytes} on a GPU of pipeline stage `number`.

    Models compute one at a time, and none more than the first, the policy: activations are its own. Exports are written
    between steps, when there are none.
    """
    stage = roles[0].stages[number]
    working = {
        "activations kept": kept(config, stage, number),
        "one layer, saved": _layer(config, stage),
        "one layer, at work": max(_layer(config, stage), attention(config)),
        "output layer": _output(config, vocab_size) if number == config.layout.pp - 1 and _has_output(config) else 0.0,
    }
    if config.layout.fp8:
        working["weights in 8 bits"] = eight_bits(config, stage, number)
    lines = held(config, roles, number) | working
    if config.run.export_every:
        lines[EXPORTS] = max(0.0, exporting(config, roles[0]) - sum(working.values()))
    if size := deepep_bytes(config):
        lines[DEEPEP] = size
    return lines | {
        LIBRARIES: FIXED if config.cluster.gpu_memory_mib else 0.0,  # CUDA's, which a CPU does not have
        ASLEEP: ENGINE_ASLEEP if _engine_sleeps(config) else 0.0,
    }


def _has_output(config: Config) -> bool:
    """Whether the model that is trained has the head of a language model."""
    return config.run.trains not in REWARD_MODELS


def exporting(config: Config, policy: Role) -> float:
    """Bytes on a GPU while the policy is written as a Hugging Face folder: of one file, and of what it is made from.

    A file of tensors, and the message that they come in; with adapters also the weights with these in them.
    """
    file = min(FILE_BYTES, weight_bytes(config) * elements(policy.stages))
    return 2.0 * file + merged_bytes(config.model, config.lora, config.layout.tp, file)


def held(config: Config, roles: list[Role], number: int) -> dict[str, float]:
    """Bytes that all models hold from step to step on a GPU of pipeline stage `number`.

    The first model's lines are called by their kind alone, a frozen model's one line by its role.
    """
    lines: dict[str, float] = {}
    for role in roles:
        own = replace(config, model=role.model) if role.model else config
        static = _static(own, role.stages[number], role.trained)
        if role is roles[0]:
            lines |= static
        elif role.trained:
            lines |= {f"{role.name}, {kind}": size for kind, size in static.items()}
        else:
            lines[role.name] = static["weights"]
    return lines


def _static(config: Config, stage: StageInventory, trained: bool) -> dict[str, float]:
    """Bytes that one model holds from step to step.

    Gradients are fp32, of what is trained: of adapters alone if there are any. With `optimizer.state.on_host` an update
    brings Adam's state one parameter at a time, when activations are gone.
    """
    weights = {"weights": float(weight_bytes(config) * (stage.dense + stage.experts))}
    if not trained:
        return weights
    return weights | {
        "gradients": 4.0 * (stage.trained_dense + stage.trained_experts),
        "optimizer": 0.0 if config.optimizer.state.on_host else state(config, stage),
    }


def state(config: Config, stage: StageInventory) -> float:
    """Bytes of Adam's state that a rank keeps; the distributed optimizer spreads it over ranks of the same weights."""
    parts = ((stage.trained_dense, stage.replicas), (stage.trained_experts, stage.expert_replicas))
    sharded = config.optimizer.distributed
    return sum(state_bytes(config) * count / (replicas if sharded else 1) for count, replicas in parts)


def state_on_host(config: Config, roles: list[Role], number: int) -> float:
    """Bytes of Adam's state that a rank of pipeline stage `number` keeps in main memory at all times."""
    if not config.optimizer.state.on_host:
        return 0.0
    return sum(state(config, role.stages[number]) for role in roles if role.trained)


def weight_bytes(config: Config) -> int:
    """Bytes of a weight."""
    return 2 if config.model.dtype == "bf16" else 4


def state_bytes(config: Config) -> int:
    """Bytes of a parameter's optimizer state: two moments, and an fp32 copy of a narrower weight."""
    moments = 4 if config.optimizer.state.moments == "bf16" else 8
    return moments + (4 if weight_bytes(config) == 2 else 0)


def saved_state_bytes(config: Config) -> int:
    """The same in a checkpoint, whose moments are fp32."""
    return 12 if weight_bytes(config) == 2 else 8


def leaves(lines: dict[str, float]) -> float:
    """Bytes of what `held` names that go to main memory when the trainer leaves the device: gradients are dropped."""
    return sum(size for name, size in lines.items() if not name.endswith("gradients"))


def kept(config: Config, stage: StageInventory, number: int) -> float:
    """Bytes of activations that wait for their backward pass.

    With full recomputation that is each layer's input, otherwise everything the backward pass reads. Early stages hold
    more micro-batches (Narayanan et al., 2021: 1F1B, and interleaved).
    """
    layout = config.layout
    each = _layer(config, stage)
    if layout.recompute == "full":
        each = 2.0 * config.model.hidden / _split(config) * _tokens(config)
    elif layout.recompute == "none":
        each += attention(config, gradients=False)
    return in_flight(layout, number) * (stage.layers + stage.predictors) * each


def in_flight(layout: LayoutConfig, number: int) -> float:
    """Micro-batches that pipeline stage `number` holds at most, of as many as there are."""
    if layout.vpp > 1:
        return (2 * (layout.pp - number - 1) + (layout.vpp - 1) * layout.pp + 1) / layout.vpp
    return float(layout.pp - number)


def eight_bits(config: Config, stage: StageInventory, number: int) -> float:
    """Bytes of weights in 8 bits, row by row and column by column, that the backward pass reads.

    Each micro-batch makes its own (`models/megatron/te_kernels.py`); with full recomputation one layer at a time.
    """
    layers = stage.layers + stage.predictors
    whole = 2.0 * (stage.dense + stage.experts)
    return whole / layers if config.layout.recompute == "full" else whole * in_flight(config.layout, number)


def most_skewed(config: Config) -> tuple[float, float, float]:
    """The (sequences, tokens of the longest, most rows of one on a rank) that take the most room in a table.

    Under context parallelism a rank holds up to all of a sequence no longer than its own rows; the shortest for which
    that is so has the most sequences beside it.
    """
    layout = config.layout
    longest = min(_tokens(config), config.model.context)
    return cells_per_token(layout.cp) * layout.micro_batch_tokens / longest, longest, longest


def attention(config: Config, gradients: bool = True) -> float:
    """Bytes that one layer's attention holds on a GPU beside what the layer saves, with `gradients` or without."""
    if attention_on_gpu(config.layout, config.model) == "padded":
        return in_table(config, *most_skewed(config), gradients)
    return in_row(config, gradients)


def in_row(config: Config, gradients: bool = True) -> float:
    """Bytes of one layer's attention by kernels for sequences of any length, see models/megatron/varlen.py.

    The layer saves queries, keys, values and outputs. Copies are made where there are keys of other ranks, and where
    keys and values have to be made equally wide. There are a gradient of each, and a call's part of it;
    FlashAttention-2 has those of keys and values for every head that reads them, and adds up a query's in fp32.
    """
    model, layout = config.model, config.layout
    keys = key_channels(model)
    values = model.mla.v_head_dim if model.attention == "mla" else keys
    widened = keys != values and attention_on_gpu(layout, model) == "torch"
    if widened:
        keys = values = max(keys, values)
    heads, kv_heads = model.heads / layout.tp, model.kv_heads / layout.tp
    rows, all_rows = _tokens(config), layout.micro_batch_tokens
    asking, asked = rows * heads * (keys + values), all_rows * kv_heads * (keys + values)
    copies = (asked if layout.cp > 1 or widened else 0.0) + (asking if widened else 0.0)
    if not gradients:
        return 2.0 * copies
    for_heads = all_rows * heads * (keys + values) if kv_heads < heads else 0.0
    sums = 2 * rows * (1 + 128 / RUN) * heads * keys  # of twice the width
    return 2.0 * (copies + asking + rows * heads * keys + 2 * asked + for_heads + sums)


def in_table(config: Config, sequences: float, longest: float, rows: float, gradients: bool = True) -> float:
    """Bytes that one layer's attention holds: tables, `gradients` of them, and a mask where there is one.

    There is one under context parallelism, for every sequence its own, and where a window is narrower than the longest
    sequence, the same for all.

    Keys and values lie in a table of [sequences, longest], repeated for every head; queries and outputs in one of
    [sequences, rows]. Of the mask torch makes one of numbers as wide as theirs; what it was made of is gone by then.
    """
    model, layout = config.model, config.layout
    mla, channels = model.mla, 2 * head_channels(model)
    if model.attention == "mla":
        channels = mla.qk_head_dim + mla.qk_rope_dim + mla.v_head_dim
    if layers_of(model.family).sinks:
        channels += 2 * CHANNELS  # for the sinks; at most so many
    width = 2 if model.dtype == "bf16" else 4
    tables = sequences * (longest + rows) * model.heads / layout.tp * channels
    masks = sequences if layout.cp > 1 else float(model.window is not None and model.window < longest)
    mask = masks * rows * longest
    return width * (tables * (2 if gradients else 1) + mask)


def layer_bytes(config: Config, stage: StageInventory) -> list[float]:
    """Bytes per token that the backward pass of a layer reads, in bf16, for every kind of layer on this stage."""
    model = config.model
    attention = 8 * model.hidden + (_latent(model) if model.attention == "mla" else _grouped(model))
    attention += adapters(config, "attention")
    kinds = []
    if stage.moe_layers or stage.predictors:
        shared = adapters(config, "mlp") if model.moe.shared_ffn_hidden else 0.0
        kinds.append(_experts(model, model.moe) + shared + adapters(config, "experts"))
    if stage.layers > stage.moe_layers:
        kinds.append(6.0 * model.ffn_hidden + adapters(config, "mlp"))
    return [(attention + kind) / _split(config) * (1 if model.dtype == "bf16" else 2) for kind in kinds]


def adapters(config: Config, target: str) -> float:
    """Bytes per token, in bf16, that adapters of one of `lora.targets` keep in a layer: A x, what B is applied to.

    Under sequence parallelism every rank has it of all tokens where the matrix is split by rows.
    """
    model, lora = config.model, config.lora
    if target not in lora.targets:
        return 0.0
    if target == "experts":
        return 2 * lora.rank * IMBALANCE * model.moe.top_k * 3
    by_rows, others = (2, 1)  # matrices that are split by rows; by columns, or not at all
    if target == "attention":
        by_rows, others = (2, 3 if model.mla.q_lora_rank else 2) if model.attention == "mla" else (3, 1)
    return 2.0 * lora.rank * (by_rows * _split(config) + others)


def _experts(model: ModelConfig, moe: MoEConfig) -> float:
    kept = layers_of(model.family).kept
    routed = IMBALANCE * moe.top_k * (2 * model.hidden + kept * moe.ffn_hidden)
    return routed + 6 * moe.shared_ffn_hidden + 8 * moe.experts


def _grouped(model: ModelConfig) -> float:
    """Queries, keys and values before and after rotation, the output, and fp32 sums of the softmax."""
    return 2 * head_channels(model) * (3 * model.heads + 3 * model.kv_heads) + 4 * model.heads


def _latent(model: ModelConfig) -> float:
    mla = model.mla
    down = 4 * (mla.q_lora_rank or 0) + 4 * mla.kv_lora_rank + 2 * mla.qk_rope_dim
    channels = 2 * (mla.qk_head_dim + mla.qk_rope_dim) + mla.qk_head_dim + 2 * mla.v_head_dim
    return down + 2 * model.heads * channels + 4 * model.heads


def _engine_sleeps(config: Config) -> bool:
    """Whether an engine with weights of its own shares the device."""
    return config.rollout.engine == "sglang" and config.rollout.sglang.first_gpu is None


def _layer(config: Config, stage: StageInventory) -> float:
    """Bytes that the largest layer saves of a micro-batch."""
    return max(layer_bytes(config, stage)) * _tokens(config)


def _output(config: Config, vocab_size: int) -> float:
    """Logits in fp32 and their gradient for a block of rows, and what stands for the weight's gradient in autograd.

    With adapters the weight has none.
    """
    columns = vocab_size / config.layout.tp
    return BLOCK_GPU * columns * 6 + (0 if config.lora.rank else 2 * columns * config.model.hidden)


def _tokens(config: Config) -> float:
    """Tokens of a micro-batch that a rank works on."""
    return config.layout.micro_batch_tokens / config.layout.cp


def _split(config: Config) -> int:
    """Ranks that share the activations of a token."""
    return config.layout.tp if config.layout.sp else 1
