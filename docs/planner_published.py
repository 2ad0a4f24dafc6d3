"""The table of docs/planner.md: what others published about runs on GPUs, and what the planner predicts for them.

    python docs/planner_published.py

Each point is a plain description: settings of this project, and what differs in the published stack, as other `Rates`
for times and as a `Practice` for memory. No constant is chosen for a point; what misses, misses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_mega import platform

platform.start()  # before Megatron is imported

from grpo_mega.config.load import compose_config  # noqa: E402
from grpo_mega.forecast.planning.hardware import RATES, Machines, machines_of  # noqa: E402
from grpo_mega.forecast.planning.inventory import Role, StageInventory, take_stock  # noqa: E402
from grpo_mega.forecast.planning.memory import (  # noqa: E402
    IMBALANCE,
    MAY_BE_PLANNED,
    Trainer,
    in_flight,
    layer_bytes,
)
from grpo_mega.forecast.planning.plan import gpus_of  # noqa: E402
from grpo_mega.forecast.planning.time import Assumed, Job, step_time  # noqa: E402
from grpo_mega.forecast.planning.training_time import Micro, after_passes, passes  # noqa: E402

QWEN3_235B = (
    "experiment=qwen3_30b_a3b", "model.layers=94", "model.hidden=4096", "model.heads=64", "model.moe.ffn_hidden=1536",
)  # fmt: skip
QWEN3_30B = ("experiment=qwen3_30b_a3b",)
MOONLIGHT = ("experiment=moonlight_16b",)
DEEPSEEK = (
    "experiment=r1zero_671b", "rollout.longer_from_step=null", "rollout.longer_max_new_tokens=null",
    "rollout.sglang.arguments.ep_size=1", "rollout.sglang.arguments.enable_dp_attention=false",
    "rollout.sglang.arguments.dp_size=1",
)  # fmt: skip
TUNED = {"hidden": 1.0, "once": True, "imbalance": 1.0, "launch": 0.0, "wait": 0.0}
"""Pre-training as its authors tuned it: exchange under computation, routing balanced by force, CUDA graphs."""


@dataclass(frozen=True)
class Point:
    """A published run.

    Attributes:
        row: Number of the table's row.
        what: Description.
        settings: This project's settings, as on a command line.
        published: The measured value.
        unit: "s" of a step, "s apart" of a step whose generation runs beside training, "s update", or "tokens/s" of a
            GPU.
        source: Where it was published.
        completion, prompt: Mean tokens.
        micro_batches: Micro-batches of a replica in an update, if no completions are generated.
        rates: Differences from `Rates`.
    """

    row: int
    what: str
    settings: tuple[str, ...]
    published: float
    unit: str
    source: str
    completion: float = 0.0
    prompt: int = 108
    micro_batches: int = 0
    rates: Mapping[str, Any] = field(default_factory=dict)


def layout(
    gpus: int, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, tokens: int = 4096, **others: Any
) -> tuple[str, ...]:
    """Settings of a layout on so many GPUs in machines of eight."""
    sizes = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": 1, "sp": str(tp > 1).lower(), "micro_batch_tokens": tokens}
    named = sizes | {"first_stage_layers": "null", "last_stage_layers": "null"} | others
    return (*(f"layout.{name}={value}" for name, value in named.items()), f"cluster.nodes={gpus // 8}")


def completions(samples: int, longest: int, engine: int, group: int = 16) -> tuple[str, ...]:
    """Settings of a step with one update, and log-probs of an old and a reference policy before it."""
    return (
        f"algorithm.prompts_per_step={samples // group}", f"algorithm.group_size={group}", "algorithm.mini_batches=1",
        "algorithm.kl_coef=0.01", "algorithm.kl_in=reward", f"rollout.max_new_tokens={longest}",
        f"rollout.sglang.tp={engine}", "model.mtp_layers=0",
    )  # fmt: skip


RL = "NeMo-RL, docs/about/performance-summary.md"
SUMMARY = "Megatron-Bridge, performance summary 26.02"
CARDS = "Megatron-Bridge, examples/model_verification_cards"
DRAFTS = "+rollout.sglang.arguments.speculative_algorithm=EAGLE"
GB200 = ("cluster.gpu=gb200", "cluster.gpus_per_node=4")
APART = ("rollout.sglang.first_gpu=8",)
POINTS = (
    Point(2, "Qwen3-30B pre-training, 16 H100", (*QWEN3_30B, *layout(16, ep=16), "layout.recompute=none"),
          13011, "tokens/s", CARDS, micro_batches=64, rates=TUNED),
    Point(3, "the same, exchange not hidden", (*QWEN3_30B, *layout(16, ep=16), "layout.recompute=none"),
          10605, "tokens/s", "Megatron-Bridge, skills/nemo-mbridge-perf-moe-comm-overlap", micro_batches=64,
          rates=TUNED | {"hidden": 0.0}),
    Point(4, "Moonlight, 8 H100, one micro-batch", (*MOONLIGHT, *layout(8, tp=2, ep=8), "layout.recompute=none"),
          0.457, "s update", "Megatron-Bridge, skills/nemo-mbridge-perf-activation-recompute", micro_batches=1,
          rates={"imbalance": 1.0}),
    Point(6, "Moonlight fine-tuning, 8 H100", (*MOONLIGHT, *layout(8, ep=8, tokens=8192), "layout.recompute=none"),
          14573, "tokens/s", CARDS, micro_batches=16, rates={}),
    Point(7, "DeepSeek-V3 pre-training, 1,024 H100",
          (*DEEPSEEK, *layout(1024, tp=2, pp=8, ep=64, vpp=4), "layout.recompute=selective"),
          1061.2, "tokens/s", CARDS, micro_batches=256, rates=TUNED),
    Point(8, "the same in fp8",
          (*DEEPSEEK, *layout(1024, tp=2, pp=8, ep=64, vpp=4), "layout.recompute=selective", "layout.fp8=true"),
          1297, "tokens/s", "Megatron-Bridge, performance summary 25.09", micro_batches=128, rates=TUNED),
    Point(10, "DeepSeek-V3 pre-training, 256 GB200",
          (*DEEPSEEK, *layout(256, pp=4, ep=64, vpp=4), "layout.recompute=selective", *GB200, "cluster.nodes=64"),
          3139, "tokens/s", "Megatron-Bridge, performance summary 25.11", micro_batches=64, rates=TUNED),
    Point(11, "Qwen3-235B pre-training, 256 GB200",
          (*QWEN3_235B, *layout(256, pp=8, ep=32, vpp=3), "layout.recompute=none", *GB200, "cluster.nodes=64"),
          4916, "tokens/s", "Megatron-Bridge, performance summary 25.11", micro_batches=64, rates=TUNED),
    Point(12, "DeepSeek-V3 pre-training in fp8, 256 GB200",
          (*DEEPSEEK, *layout(256, pp=4, ep=64, vpp=4), "layout.recompute=selective", "layout.fp8=true", *GB200,
           "cluster.nodes=64"),
          3955, "tokens/s", SUMMARY, micro_batches=64, rates=TUNED),
    Point(20, "Qwen3-235B pre-training in fp8, 256 GB200",
          (*QWEN3_235B, *layout(256, pp=8, ep=32, vpp=3), "layout.recompute=none", "layout.fp8=true", *GB200,
           "cluster.nodes=64"),
          5448, "tokens/s", SUMMARY, micro_batches=64, rates=TUNED),
    Point(21, "Qwen3-235B pre-training in fp8, 256 H100",
          (*QWEN3_235B, *layout(256, tp=2, pp=8, ep=32, vpp=4), "layout.recompute=selective", "layout.fp8=true"),
          1633, "tokens/s", SUMMARY, micro_batches=256, rates=TUNED),
    Point(13, "DeepSeek-V3 GRPO, 256 H100",
          (*DEEPSEEK, *layout(256, pp=16, ep=16, tokens=1536, first_stage_layers=3, last_stage_layers=2),
           *completions(512, 1428, 32), DRAFTS), 134, "s", RL, completion=701),
    Point(15, "the same, 256 + 256, one step apart",
          (*DEEPSEEK, *layout(256, pp=16, ep=16, tokens=1536, first_stage_layers=3, last_stage_layers=2),
           *completions(512, 1428, 32), DRAFTS, *APART), 64.1, "s apart", RL, completion=701),
    Point(16, "Qwen3-235B GRPO, 128 H100",
          (*QWEN3_235B, *layout(128, tp=2, cp=2, pp=8, ep=16, tokens=8192, first_stage_layers=11, last_stage_layers=11),
           *completions(512, 8084, 16)), 395, "s", RL, completion=5698),
    Point(17, "the same, 256 H100",
          (*QWEN3_235B, *layout(256, tp=2, cp=2, pp=8, ep=16, tokens=8192, first_stage_layers=11, last_stage_layers=11),
           *completions(512, 8084, 16)), 312, "s", RL, completion=5698),
    Point(18, "the same, 128 + 128, one step apart",
          (*QWEN3_235B, *layout(128, tp=4, pp=8, ep=16, tokens=8192, first_stage_layers=11, last_stage_layers=11),
           *completions(512, 8084, 8), *APART), 231, "s apart", RL, completion=5698),
    Point(19, "Qwen3-30B GRPO, 32 H100", (*QWEN3_30B, *layout(32, ep=8), *completions(2048, 3988, 2)),
          192, "s", RL, completion=3203),
)  # fmt: skip


def predicted(point: Point) -> float:
    """The planner's value, in the unit of the point; with all the memory that an engine's cache may need."""
    config = compose_config([*point.settings], checked=False)
    machines = machines_of(config.cluster, gpus_of(config.cluster), replace(RATES, **point.rates))
    assert machines is not None, point.settings
    trainer, vocab_size = Trainer.of(config), config.model.vocab_size or 0
    stages = take_stock(config.model, config.layout, vocab_size, machines.gpus, lora=config.lora, counted=True)
    roles = [Role("policy", True, True, stages), Role("reference policy", False, True, stages)]
    job = Job(config, roles, vocab_size, machines)
    if point.micro_batches:
        seconds = update_seconds(trainer, stages, machines, point.micro_batches)
        tokens = point.micro_batches * config.layout.micro_batch_tokens * job.replicas
        return seconds if point.unit == "s update" else tokens / seconds / machines.gpus
    step = step_time(job, 1e12, config.rollout.max_new_tokens, Assumed(point.completion, point.prompt))
    if point.unit == "s":
        return step.seconds
    generation = step.phases[0].seconds
    weights = sum(phase.seconds for phase in step.phases if phase.name == "weights to the engines")
    return max(generation, step.seconds - generation - weights) + weights


def update_seconds(trainer: Trainer, stages: Sequence[StageInventory], machines: Machines, micro_batches: int) -> float:
    """Seconds of an update with so many full micro-batches, of one sequence each, in every replica."""
    tokens = trainer.layout.micro_batch_tokens
    slots = passes(trainer, stages, [Micro(tokens, tokens / 2)] * micro_batches, machines, training=True)
    micro_seconds = (slots.seconds - slots.parts["bubble"]) / micro_batches
    return slots.seconds + sum(after_passes(trainer, stages[slots.stage], machines, micro_seconds).values())


def line(point: Point, planned: float) -> str:
    """The point's row of the table."""
    unit = point.unit.split()[0]
    off = f"{planned / point.published - 1:+.0%}"
    texts = [f"{value:,.0f}" if value > 1000 else f"{value:.3g}" for value in (point.published, planned)]
    return f"| {point.row} | {point.what} | {texts[0]} {unit} | {texts[1]} {unit} | {off} | {point.source} |"


LIBRARY_BYTES = 8e9
"""Assumed bytes of CUDA, workspaces and NCCL besides torch's."""


@dataclass(frozen=True)
class Practice:
    """How a published trainer uses memory: it may differ from what the presets here can set.

    Attributes:
        gradient: Bytes of a gradient.
        optimizer: Bytes of a parameter's optimizer state on the GPU; 0 if it is on the host.
        recomputed: Recomputed modules: "mla_up_proj", and "mlp" for the dense one and the shared expert.
        balanced: Whether experts are forced to get equally many tokens.
        logits: Bytes per element of all logits; 0 if they are computed in chunks.
        libraries: Bytes besides torch's.
    """

    gradient: int = 4
    optimizer: int = 12
    recomputed: tuple[str, ...] = ()
    balanced: bool = False
    logits: int = 0
    libraries: float = LIBRARY_BYTES


@dataclass(frozen=True)
class MemoryPoint:
    """A published run, see `Point`; `published` in bytes, or whether it fits."""

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
    """Bytes of the fullest GPU, and those of it that may be planned."""
    config = compose_config([*point.settings], checked=False)
    stages = take_stock(
        config.model,
        config.layout,
        config.model.vocab_size or 0,
        gpus_of(config.cluster),
        lora=config.lora,
        counted=True,
    )
    trainer = Trainer.of(config)
    most = max(elsewhere(trainer, stages, number, point.practice) for number in range(config.layout.pp))
    return most, MAY_BE_PLANNED * (config.cluster.gpu_memory_mib or 0) * 2**20


def memory_line(point: MemoryPoint, size: float, limit: float) -> str:
    """The point's row of the table, with the values of `planned_bytes`."""
    if isinstance(point.published, bool):
        said, off = ("fits" if point.published else "does not fit"), f"of {limit / 1e9:.1f} GB"
    else:
        said, off = f"{point.published / 1e9:.1f} GB", f"{size / point.published - 1:+.0%}"
    return f"| {point.row} | {point.what} | {said} | {size / 1e9:.1f} GB | {off} | {point.source} |"


def elsewhere(trainer: Trainer, stages: Sequence[StageInventory], number: int, practice: Practice) -> float:
    """Bytes of a GPU of pipeline stage `number` of a trainer with this practice."""
    stage, layout, model = stages[number], trainer.layout, trainer.model
    static = 0.0
    for count, replicas in ((stage.dense, stage.replicas), (stage.experts, stage.expert_replicas)):
        static += count * (2 + practice.gradient + practice.optimizer / replicas)
    tokens = trainer.rows
    layers = in_flight(layout, number) * (stage.layers + stage.predictors)
    each = saved_per_token(trainer, stage, practice)
    if layout.recompute == "full":
        activations = layers * 2 * model.hidden * tokens / layout.tp + 2 * each * tokens
    else:
        activations = layers * each * tokens
    last = number == layout.pp - 1
    logits = practice.logits * (model.vocab_size or 0) / layout.tp * tokens if last else 0.0
    return static + activations + logits + practice.libraries


def saved_per_token(trainer: Trainer, stage: StageInventory, practice: Practice) -> float:
    """Bytes that the largest layer keeps of a token."""
    model, moe, mla, tp = trainer.model, trainer.model.moe, trainer.model.mla, trainer.layout.tp
    saved = max(layer_bytes(trainer, stage)) * tp
    if practice.balanced:
        saved -= (IMBALANCE - 1) * moe.top_k * (2 * model.hidden + 6 * moe.ffn_hidden)
    if "mla_up_proj" in practice.recomputed:
        saved -= 2 * model.heads * (2 * (mla.qk_head_dim + mla.qk_rope_dim) + mla.qk_head_dim + mla.v_head_dim)
    if "mlp" in practice.recomputed:
        saved -= 6 * moe.shared_ffn_hidden
    return saved / tp


if __name__ == "__main__":
    print("| row | run | published | planned | off by | source |\n| --- | --- | --- | --- | --- | --- |")
    for point in POINTS:
        print(line(point, predicted(point)))
    for memory in MEMORY_POINTS:
        print(memory_line(memory, *planned_bytes(memory)))
