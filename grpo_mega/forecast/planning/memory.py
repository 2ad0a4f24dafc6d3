"""Bytes that training takes on a GPU: exact for weights, gradients and optimizer state, estimated for the rest.

The estimate assumes attention without a matrix of scores, and sequence parallelism wherever there is tensor
parallelism. Where attention works on padded tables, micro-batches are as skewed as models/schedule.py allows: one long
sequence beside short ones in a table of the same width. The lines add up to the peak of the trainer's turn on the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from grpo_kernels.chunked import BLOCK_GPU
from grpo_mega.config.derived import attention_on_gpu
from grpo_mega.config.rules.layout import DEEPEP_MACHINE
from grpo_mega.config.schema import (
    REWARD_MODELS,
    Config,
    LayoutConfig,
    LoRAConfig,
    ModelConfig,
    OptimizerConfig,
)
from grpo_mega.forecast.planning.counting import channels
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
"""Share of a GPU's memory that a plan may use; fragmentation takes the rest."""
IMBALANCE = 1.5
"""Tokens of the busiest rank's experts over the average."""
RUN = 512
"""Mean tokens of a run of a micro-batch (`models/megatron/runs.py`); FlashAttention-2 pads each by up to 128 rows."""

DEEPEP_CHANNELS = 10
"""Half of the 20 multiprocessors that Megatron gives DeepEP (`moe_deepep_num_sms`)."""
DEEPEP_RDMA_ROWS = 140
"""Rows of a channel for every other machine: 128, rounded up to a multiple of the 28 that are sent at once."""
DEEPEP_ROW_EXTRA = 8 + 128 * (8 + 4 + 4)
"""Bytes of a row besides its numbers: its source; up to 128 experts with their weights, and scales."""
DEEPEP_SPARE = 1 << 20
"""Bytes of DeepEP's safety margin."""
DEEPEP_WORKSPACE = 32 << 20
"""Bytes of DeepEP's workspace."""


@dataclass(frozen=True)
class Trainer:
    """The sections of a configuration that training's memory and seconds depend on."""

    model: ModelConfig
    layout: LayoutConfig
    lora: LoRAConfig
    optimizer: OptimizerConfig

    @classmethod
    def of(cls, config: Config) -> Trainer:
        """The trainer of a run's policy."""
        return cls(config.model, config.layout, config.lora, config.optimizer)

    def of_role(self, role: Role) -> Trainer:
        """The same settings for the architecture of another model of the run."""
        return replace(self, model=role.model) if role.model else self

    @property
    def rows(self) -> float:
        """Tokens of a micro-batch on one context parallel rank."""
        return self.layout.micro_batch_tokens / self.layout.cp

    @property
    def split(self) -> int:
        """Ranks that share the activations of a token."""
        return self.layout.tp if self.layout.sp else 1

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight."""
        return 2 if self.model.dtype == "bf16" else 4

    @property
    def state_bytes(self) -> int:
        """Bytes of a parameter's optimizer state: two moments, and an fp32 copy of a narrower weight."""
        moments = 4 if self.optimizer.state.moments == "bf16" else 8
        return moments + (4 if self.weight_bytes == 2 else 0)

    @property
    def saved_state_bytes(self) -> int:
        """Bytes of a parameter's optimizer state in a checkpoint, where moments are fp32."""
        return 12 if self.weight_bytes == 2 else 8


def memory(config: Config, roles: list[Role], number: int, vocab_size: int) -> dict[str, float]:
    """{line: bytes} of a GPU of pipeline stage `number`.

    Models compute one at a time, and none needs more than the first one, the policy: activations are the policy's.
    """
    trainer, stage = Trainer.of(config), roles[0].stages[number]
    layout, saved = config.layout, largest_layer(trainer, stage)
    output = 0.0
    if number == layout.pp - 1 and config.run.trains not in REWARD_MODELS:
        # For a block of rows, logits in fp32 and their gradient in bf16 are 6 bytes; autograd copies the weight's
        # gradient in bf16. With adapters the weight has no gradient.
        columns = vocab_size / layout.tp
        output = BLOCK_GPU * columns * 6 + (0 if trainer.lora.rank else 2 * columns * trainer.model.hidden)
    working = {
        "activations kept": activations_kept(trainer, stage, number),
        "one layer, saved": saved,
        "one layer, at work": max(saved, attention(trainer)),
        "output layer": output,
    }
    if layout.fp8:
        working["weights in 8 bits"] = eight_bits(layout, stage, number)
    lines = held(trainer, roles, number) | working
    if config.run.export_every:
        # An export takes one file of tensors and the message that delivers them; with adapters also the merged weights.
        file = min(FILE_BYTES, trainer.weight_bytes * elements(roles[0].stages))
        exporting = 2.0 * file + merged_bytes(trainer.model, trainer.lora, layout.tp, file)
        # It is written between steps, when working memory is free: only what exceeds that raises the peak.
        lines[EXPORTS] = max(0.0, exporting - sum(working.values()))
    if size := deepep_bytes(config.model, layout):
        lines[DEEPEP] = size
    engine_shares_gpu = config.rollout.engine == "sglang" and config.rollout.sglang.first_gpu is None
    return lines | {
        # A plan of CPUs has none of CUDA's libraries.
        LIBRARIES: FIXED if config.cluster.gpu_memory_mib else 0.0,
        ASLEEP: ENGINE_ASLEEP if engine_shares_gpu else 0.0,
    }


def held(trainer: Trainer, roles: list[Role], number: int) -> dict[str, float]:
    """{line: bytes} that all models hold from step to step on a GPU of pipeline stage `number`.

    The first model's lines are named by their kind alone, a frozen model's single line by its role.
    """
    lines: dict[str, float] = {}
    for role in roles:
        static = _static(trainer.of_role(role), role.stages[number], role.trained)
        if role is roles[0]:
            lines |= static
        elif role.trained:
            lines |= {f"{role.name}, {kind}": size for kind, size in static.items()}
        else:
            lines[role.name] = static["weights"]
    return lines


def _static(trainer: Trainer, stage: StageInventory, trained: bool) -> dict[str, float]:
    """{kind: bytes} that one model holds from step to step.

    Gradients are fp32 and exist only for what is trained. With `optimizer.state.on_host` an update fetches Adam's state
    one parameter at a time, when no activations are left.
    """
    weights = {"weights": float(trainer.weight_bytes * (stage.dense + stage.experts))}
    if not trained:
        return weights
    return weights | {
        "gradients": 4.0 * (stage.trained_dense + stage.trained_experts),
        "optimizer": 0.0 if trainer.optimizer.state.on_host else optimizer_state(trainer, stage),
    }


def optimizer_state(trainer: Trainer, stage: StageInventory) -> float:
    """Bytes of Adam's state on a rank; the distributed optimizer spreads it over ranks with the same weights."""
    parts = ((stage.trained_dense, stage.replicas), (stage.trained_experts, stage.expert_replicas))
    sharded = trainer.optimizer.distributed
    return sum(trainer.state_bytes * count / (replicas if sharded else 1) for count, replicas in parts)


def leaves(lines: dict[str, float]) -> float:
    """Bytes of the lines of `held` that move to main memory when the trainer leaves the GPU: gradients are dropped."""
    return sum(size for name, size in lines.items() if not name.endswith("gradients"))


def activations_kept(trainer: Trainer, stage: StageInventory, number: int) -> float:
    """Bytes of activations that wait for their backward pass.

    With full recomputation each layer's input, otherwise everything that the backward pass reads. Early stages hold
    more micro-batches (Narayanan et al., 2021: 1F1B, and interleaved).
    """
    layout, each = trainer.layout, largest_layer(trainer, stage)
    if layout.recompute == "full":
        each = 2.0 * trainer.model.hidden / trainer.split * trainer.rows
    elif layout.recompute == "none":
        each += attention(trainer, gradients=False)
    return in_flight(layout, number) * (stage.layers + stage.predictors) * each


def in_flight(layout: LayoutConfig, number: int) -> float:
    """Most micro-batches that pipeline stage `number` holds at once, if there are enough."""
    if layout.vpp > 1:
        # An interleaved stage first makes two forward passes for each stage after it, and those of pp micro-batches
        # through all its pieces but the last; then forward and backward passes alternate. Each pass is through one
        # piece, which has 1 / vpp of the stage's layers.
        return (2 * (layout.pp - number - 1) + (layout.vpp - 1) * layout.pp + 1) / layout.vpp
    return float(layout.pp - number)


def eight_bits(layout: LayoutConfig, stage: StageInventory, number: int) -> float:
    """Bytes of 8-bit weights, by rows and by columns, that the backward pass reads.

    Each micro-batch makes its own copy (`models/megatron/te_kernels.py`); with full recomputation one layer at a time.
    """
    layers = stage.layers + stage.predictors
    whole = 2.0 * (stage.dense + stage.experts)
    return whole / layers if layout.recompute == "full" else whole * in_flight(layout, number)


def most_skewed(trainer: Trainer) -> tuple[float, float, float]:
    """(sequences, tokens of the longest, most rows of a sequence on a rank) of the micro-batch with the largest table.

    Under context parallelism a rank holds all of a sequence that is no longer than the rank's rows; the shortest such
    sequence leaves room for the most sequences beside it.
    """
    layout = trainer.layout
    longest = min(trainer.rows, trainer.model.context)
    return cells_per_token(layout.cp) * layout.micro_batch_tokens / longest, longest, longest


def attention(trainer: Trainer, gradients: bool = True) -> float:
    """Bytes of one layer's attention on a GPU besides what the layer saves, with `gradients` or without."""
    if attention_on_gpu(trainer.layout, trainer.model) == "padded":
        return in_table(trainer, *most_skewed(trainer), gradients)
    return _in_row(trainer, gradients)


def _in_row(trainer: Trainer, gradients: bool) -> float:
    """Bytes of one layer's attention by kernels for sequences of any length, see models/megatron/varlen.py.

    The layer saves queries, keys, values and outputs. Copies are made of other ranks' keys, and where keys and values
    must be equally wide. Each tensor has a gradient, and one part of it per call; FlashAttention-2 keeps gradients of
    keys and values for every head that reads them, and accumulates those of queries in fp32.
    """
    model, layout = trainer.model, trainer.layout
    # torch's operator wants keys and values of one width, so the narrower ones are padded.
    keys, values = channels(model)
    widened = keys != values and attention_on_gpu(layout, model) == "torch"
    if widened:
        keys = values = max(keys, values)
    heads, kv_heads = model.heads / layout.tp, model.kv_heads / layout.tp
    rows, all_rows = trainer.rows, layout.micro_batch_tokens
    queries_and_outputs = rows * heads * (keys + values)
    keys_and_values = all_rows * kv_heads * (keys + values)
    copies = (keys_and_values if layout.cp > 1 or widened else 0.0) + (queries_and_outputs if widened else 0.0)
    if not gradients:
        return 2.0 * copies
    # Elements of what FlashAttention-2 adds in the backward pass.
    for_heads = all_rows * heads * (keys + values) if kv_heads < heads else 0.0
    # The factor 2 is for fp32, beside the 2 bytes of bf16 that multiply everything below.
    sums = 2 * rows * (1 + 128 / RUN) * heads * keys
    return 2.0 * (copies + queries_and_outputs + rows * heads * keys + 2 * keys_and_values + for_heads + sums)


def in_table(trainer: Trainer, sequences: float, longest: float, rows: float, gradients: bool = True) -> float:
    """Bytes of one layer's attention on padded tables: the tables, `gradients` of them, and a mask if it needs one.

    Keys and values fill a table of [sequences, longest], repeated for every head; queries and outputs one of
    [sequences, rows]. Context parallelism needs a mask for every sequence, a window narrower than the longest sequence
    one for all. Torch turns the mask into numbers as wide as the tables'; its source is freed before.
    """
    model, layout = trainer.model, trainer.layout
    # Sinks widen queries and keys by at most so many channels.
    width = sum(channels(model)) + (2 * CHANNELS if layers_of(model.family).sinks else 0)
    tables = sequences * (longest + rows) * model.heads / layout.tp * width
    masks = sequences if layout.cp > 1 else float(model.window is not None and model.window < longest)
    mask = masks * rows * longest
    return trainer.weight_bytes * (tables * (2 if gradients else 1) + mask)


def largest_layer(trainer: Trainer, stage: StageInventory) -> float:
    """Bytes of a micro-batch that the largest layer saves."""
    return max(layer_bytes(trainer, stage)) * trainer.rows


def layer_bytes(trainer: Trainer, stage: StageInventory) -> list[float]:
    """Bytes per token that the backward pass of a layer reads, in bf16, for every kind of layer on this stage."""
    model, moe, mla = trainer.model, trainer.model.moe, trainer.model.mla
    # Queries, keys and values before and after rotation, and the output; latent attention also has down-projections.
    if model.attention == "mla":
        down = 4 * (mla.q_lora_rank or 0) + 4 * mla.kv_lora_rank + 2 * mla.qk_rope_dim
        width = 2 * (mla.qk_head_dim + mla.qk_rope_dim) + mla.qk_head_dim + 2 * mla.v_head_dim
        heads = down + 2 * model.heads * width
    else:
        heads = 2 * head_channels(model) * (3 * model.heads + 3 * model.kv_heads)
    # The layer's inputs and norms, and fp32 sums of the softmax.
    attention = 8 * model.hidden + heads + 4 * model.heads + adapter_bytes(trainer, "attention")
    kinds = []
    if stage.moe_layers or stage.predictors:
        routed = IMBALANCE * moe.top_k * (2 * model.hidden + layers_of(model.family).kept * moe.ffn_hidden)
        shared = adapter_bytes(trainer, "mlp") if moe.shared_ffn_hidden else 0.0
        experts = routed + 6 * moe.shared_ffn_hidden + 8 * moe.experts
        kinds.append(experts + shared + adapter_bytes(trainer, "experts"))
    if stage.layers > stage.moe_layers:
        kinds.append(6.0 * model.ffn_hidden + adapter_bytes(trainer, "mlp"))
    return [(attention + kind) / trainer.split * (1 if model.dtype == "bf16" else 2) for kind in kinds]


def adapter_bytes(trainer: Trainer, target: str) -> float:
    """Bytes per token, in bf16, of A x, the input of B, for the adapters of one of `lora.targets` in a layer.

    Under sequence parallelism every rank holds it for all tokens where the matrix is split by rows.
    """
    model, lora = trainer.model, trainer.lora
    if target not in lora.targets:
        return 0.0
    if target == "experts":
        return 2 * lora.rank * IMBALANCE * model.moe.top_k * 3
    # Matrices that are split by rows, and those that are split by columns or not at all.
    by_rows, others = (2, 1)
    if target == "attention":
        by_rows, others = (2, 3 if model.mla.q_lora_rank else 2) if model.attention == "mla" else (3, 1)
    return 2.0 * lora.rank * (by_rows * trainer.split + others)


def deepep_bytes(model: ModelConfig, layout: LayoutConfig) -> float:
    """Bytes of DeepEP's buffers on a GPU, outside of torch's memory; 0 unless it exchanges tokens between GPUs.

    Megatron asks DeepEP for buffers of the recommended size (`get_nvl_buffer_size_hint` and `get_rdma_buffer_size_hint`
    of its csrc/config.hpp, for the settings of `get_dispatch_config` in its buffer.py), once for all layers.
    """
    ranks = layout.ep
    if layout.dispatch != "deepep" or ranks == 1:
        return 0.0
    row = 2 * model.hidden + DEEPEP_ROW_EXTRA
    near, machines = min(ranks, DEEPEP_MACHINE), ranks // DEEPEP_MACHINE
    rows = 256 if ranks <= DEEPEP_MACHINE else 288 if ranks <= 64 else 560 if ranks <= 128 else 720
    inside = DEEPEP_CHANNELS * near * rows * row
    across = 0
    # Twice, to send and to receive.
    if machines > 1:
        across = DEEPEP_CHANNELS * machines * DEEPEP_RDMA_ROWS * 2 * (row + 16) + DEEPEP_SPARE
    return float(inside + across + DEEPEP_WORKSPACE)
