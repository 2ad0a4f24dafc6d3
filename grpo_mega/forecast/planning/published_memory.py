"""Published memory of others' runs, beside what the planner's lines make of the same: part of docs/planner.md's table.

Their trainers differ from what the presets here have: attention without tables, gradients or moments in bf16, an
optimizer on the host, single modules that are recomputed. `Practice` says how; the counts are those of `shares.py` and
`memory.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_mega.config.load import compose_config
from grpo_mega.config.schema import Config
from grpo_mega.forecast.planning.inventory import StageInventory
from grpo_mega.forecast.planning.memory import IMBALANCE, MAY_BE_PLANNED, in_flight, layer_bytes
from grpo_mega.forecast.planning.published import CARDS, DEEPSEEK, MOONLIGHT, QWEN3_30B, layout
from grpo_mega.forecast.planning.shares import shared_out

LIBRARIES = 8e9
"""CUDA, workspaces and NCCL beside what torch allocates; an assumption."""


@dataclass(frozen=True)
class Practice:
    """How a trainer holds what it computes with.

    Attributes:
        gradient: Bytes of a gradient.
        optimizer: Bytes of a parameter's optimizer state on the GPU; 0 for one on the host.
        recomputed: Modules that are recomputed: "mla_up_proj" and "mlp", the dense one and the shared expert.
        balanced: Experts get equally many tokens, by force.
        logits: Bytes of an element of all logits; 0 where they are computed in chunks.
        libraries: Bytes beside torch's.
    """

    gradient: int = 4
    optimizer: int = 12
    recomputed: tuple[str, ...] = ()
    balanced: bool = False
    logits: int = 0
    libraries: float = LIBRARIES


@dataclass(frozen=True)
class MemoryPoint:
    """A published run, see `published.Point`; `published` in bytes, or whether it fits."""

    row: int
    what: str
    settings: tuple[str, ...]
    published: float | bool
    source: str
    practice: Practice


GUIDES = "slime, docs/en/examples"
PRETRAINED = Practice(gradient=2, optimizer=8, balanced=True, logits=6, libraries=0.0)
MEMORY_POINTS = (
    MemoryPoint(1, "Qwen3-30B pre-training, 16 H100", (*QWEN3_30B, *layout(16, ep=16), "layout.recompute=none"),
                62.166 * 2**30, "Megatron-Bridge, skills/nemo-mbridge-perf-moe-hardware-configs",
                Practice(gradient=2, balanced=True, logits=6, libraries=0.0)),
    MemoryPoint(4, "Moonlight pre-training, 8 H100", (*MOONLIGHT, *layout(8, tp=2, ep=8), "layout.recompute=none"),
                36.618e9, "Megatron-Bridge, skills/nemo-mbridge-perf-activation-recompute", PRETRAINED),
    MemoryPoint(7, "DeepSeek-V3 pre-training, 1,024 H100",
                (*DEEPSEEK, *layout(1024, tp=2, pp=8, ep=64, vpp=4), "layout.recompute=none", "cluster=h100"),
                True, CARDS, Practice(gradient=2, optimizer=8, recomputed=("mla_up_proj", "mlp"), balanced=True)),
    MemoryPoint(9, "DeepSeek-V3 pre-training, 256 H200",
                (*DEEPSEEK, *layout(256, pp=16, ep=8), "layout.recompute=none", "cluster=h200"),
                True, "AI-Hypercomputer/gpu-recipes, a3ultra",
                Practice(gradient=2, optimizer=8, recomputed=("mla_up_proj",), balanced=True)),
    MemoryPoint(13, "DeepSeek-V3 GRPO, 256 H100",
                (*DEEPSEEK, *layout(256, pp=16, ep=16, tokens=1536, first_stage_layers=3, last_stage_layers=2),
                 "model.mtp_layers=0", "layout.recompute=full"),
                True, "NeMo-RL, grpo-deepseek-v3-32n8g", Practice(gradient=2, optimizer=8)),
    MemoryPoint(23, "DeepSeek-R1 GRPO, 128 H100",
                (*DEEPSEEK, *layout(128, tp=8, pp=4, cp=4, ep=32, tokens=65536, last_stage_layers=13),
                 "model.mtp_layers=0", "layout.recompute=full"), True, GUIDES, Practice(optimizer=0)),
    MemoryPoint(24, "Qwen3-30B GRPO, 8 H100, optimizer on the host",
                (*QWEN3_30B, *layout(8, tp=4, ep=8, tokens=20480), "layout.recompute=full"), True, GUIDES,
                Practice(optimizer=0)),
    MemoryPoint(24, "Qwen3-30B GRPO, 8 H100, optimizer on the GPU",
                (*QWEN3_30B, *layout(8, tp=4, ep=8, tokens=20480), "layout.recompute=full"), False, GUIDES, Practice()),
)  # fmt: skip


def planned_bytes(point: MemoryPoint) -> tuple[float, float]:
    """Bytes of the fullest GPU, and those that may be planned of it."""
    config = compose_config([*point.settings], checked=False)
    gpus = (config.cluster.nodes or 1) * config.cluster.gpus_per_node
    stages = shared_out(config, config.model.vocab_size or 0, gpus)
    most = max(elsewhere(config, stages, number, point.practice) for number in range(config.layout.pp))
    return most, MAY_BE_PLANNED * (config.cluster.gpu_memory_mib or 0) * 2**20


def memory_line(point: MemoryPoint, size: float, limit: float) -> str:
    """The point's line of the table, with what `planned_bytes` says."""
    if isinstance(point.published, bool):
        said, off = ("fits" if point.published else "does not fit"), f"of {limit / 1e9:.1f} GB"
    else:
        said, off = f"{point.published / 1e9:.1f} GB", f"{size / point.published - 1:+.0%}"
    return f"| {point.row} | {point.what} | {said} | {size / 1e9:.1f} GB | {off} | {point.source} |"


def elsewhere(config: Config, stages: Sequence[StageInventory], number: int, practice: Practice) -> float:
    """Bytes of a GPU of pipeline stage `number` of a trainer with this practice."""
    stage, layout = stages[number], config.layout
    static = 0.0
    for count, replicas in ((stage.dense, stage.replicas), (stage.experts, stage.expert_replicas)):
        static += count * (2 + practice.gradient + practice.optimizer / replicas)
    tokens = layout.micro_batch_tokens / layout.cp
    layers = in_flight(layout, number) * (stage.layers + stage.predictors)
    each = _saved(config, stage, practice)
    if layout.recompute == "full":
        activations = layers * 2 * config.model.hidden * tokens / layout.tp + 2 * each * tokens
    else:
        activations = layers * each * tokens
    last = number == layout.pp - 1
    logits = practice.logits * (config.model.vocab_size or 0) / layout.tp * tokens if last else 0.0
    return static + activations + logits + practice.libraries


def _saved(config: Config, stage: StageInventory, practice: Practice) -> float:
    """Bytes that the largest layer keeps of a token."""
    model, moe, mla = config.model, config.model.moe, config.model.mla
    saved = max(layer_bytes(config, stage)) * config.layout.tp
    if practice.balanced:
        saved -= (IMBALANCE - 1) * moe.top_k * (2 * model.hidden + 6 * moe.ffn_hidden)
    if "mla_up_proj" in practice.recomputed:
        saved -= 2 * model.heads * (2 * (mla.qk_head_dim + mla.qk_rope_dim) + mla.qk_head_dim + mla.v_head_dim)
    if "mlp" in practice.recomputed:
        saved -= 6 * moe.shared_ffn_hidden
    return saved / config.layout.tp
