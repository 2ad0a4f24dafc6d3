"""What others published about runs on GPUs, beside what this planner says of the same: the table of docs/planner.md.

    python -m grpo_mega.forecast.planning.published

Each point is a plain description: settings of this project, and where their stack differs from it, other `Rates`. No
constant is chosen for a point; what misses, misses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_mega.config.load import compose_config
from grpo_mega.config.schema import Config
from grpo_mega.forecast.planning.hardware import RATES, Machines, machines_of
from grpo_mega.forecast.planning.inventory import Role
from grpo_mega.forecast.planning.shares import shared_out
from grpo_mega.forecast.planning.time import Assumed, step_time
from grpo_mega.forecast.planning.training_time import Micro, after_passes, passes

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
        row: Its number in the table.
        what: In words.
        settings: This project's, as on a command line.
        published: What was measured.
        unit: Of it: "s" of a step, "s apart" of one whose generation runs beside training, or "tokens/s" of a GPU.
        source: Where it is from.
        answer, prompt: Mean tokens.
        micro_batches: Of a replica in an update, where no answers are generated.
        rates: What differs from `Rates`.
    """

    row: int
    what: str
    settings: tuple[str, ...]
    published: float
    unit: str
    source: str
    answer: float = 0.0
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


def answers(samples: int, longest: int, engine: int, group: int = 16) -> tuple[str, ...]:
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
           *answers(512, 1428, 32), DRAFTS), 134, "s", RL, answer=701),
    Point(15, "the same, 256 + 256, one step apart",
          (*DEEPSEEK, *layout(256, pp=16, ep=16, tokens=1536, first_stage_layers=3, last_stage_layers=2),
           *answers(512, 1428, 32), DRAFTS, *APART), 64.1, "s apart", RL, answer=701),
    Point(16, "Qwen3-235B GRPO, 128 H100",
          (*QWEN3_235B, *layout(128, tp=2, cp=2, pp=8, ep=16, tokens=8192, first_stage_layers=11, last_stage_layers=11),
           *answers(512, 8084, 16)), 395, "s", RL, answer=5698),
    Point(17, "the same, 256 H100",
          (*QWEN3_235B, *layout(256, tp=2, cp=2, pp=8, ep=16, tokens=8192, first_stage_layers=11, last_stage_layers=11),
           *answers(512, 8084, 16)), 312, "s", RL, answer=5698),
    Point(18, "the same, 128 + 128, one step apart",
          (*QWEN3_235B, *layout(128, tp=4, pp=8, ep=16, tokens=8192, first_stage_layers=11, last_stage_layers=11),
           *answers(512, 8084, 8), *APART), 231, "s apart", RL, answer=5698),
    Point(19, "Qwen3-30B GRPO, 32 H100", (*QWEN3_30B, *layout(32, ep=8), *answers(2048, 3988, 2)),
          192, "s", RL, answer=3203),
)  # fmt: skip


def predicted(point: Point) -> float:
    """What the planner says, in the unit of the point; with all the memory that an engine's cache may need."""
    config = compose_config([*point.settings], checked=False)
    machines = machines_of(config.cluster, _gpus(config), replace(RATES, **point.rates))
    assert machines is not None, point.settings
    if point.micro_batches:
        seconds = update_seconds(config, machines, point.micro_batches)
        tokens = point.micro_batches * config.layout.micro_batch_tokens * _replicas(config)
        return seconds if point.unit == "s update" else tokens / seconds / machines.gpus
    vocab_size = config.model.vocab_size or 0
    roles = [Role("policy", True, True, stages := shared_out(config, vocab_size, machines.gpus))]
    roles.append(Role("reference policy", False, True, stages))
    assumed = Assumed(point.answer, point.prompt)
    step = step_time(config, roles, vocab_size, machines, 1e12, config.rollout.max_new_tokens, assumed)
    if point.unit == "s":
        return step.seconds
    generation = step.phases[0].seconds
    weights = sum(phase.seconds for phase in step.phases if phase.name == "weights to the engines")
    return max(generation, step.seconds - generation - weights) + weights


def update_seconds(config: Config, machines: Machines, micro_batches: int) -> float:
    """Seconds of an update with so many full micro-batches, each of one sequence, in every replica."""
    tokens = config.layout.micro_batch_tokens
    stages = shared_out(config, config.model.vocab_size or 0, machines.gpus)
    slots = passes(config, stages, [Micro(tokens, tokens / 2)] * micro_batches, machines, training=True)
    one = (slots.seconds - slots.parts["bubble"]) / micro_batches
    return slots.seconds + sum(after_passes(config, stages[slots.stage], machines, one).values())


def _gpus(config: Config) -> int:
    return (config.cluster.nodes or 1) * config.cluster.gpus_per_node


def _replicas(config: Config) -> int:
    layout = config.layout
    return _gpus(config) // (layout.tp * layout.pp * layout.cp)


def line(point: Point, found: float) -> str:
    """The point's line of the table, with what the planner says."""
    unit = point.unit.split()[0]
    off = f"{found / point.published - 1:+.0%}"
    published, planned = (f"{value:,.0f}" if value > 1000 else f"{value:.3g}" for value in (point.published, found))
    return f"| {point.row} | {point.what} | {published} {unit} | {planned} {unit} | {off} | {point.source} |"


def main() -> None:
    """Prints the table: times, then memory."""
    from grpo_mega.forecast.planning.published_memory import MEMORY_POINTS, memory_line, planned_bytes

    print("| row | run | published | planned | off by | source |\n| --- | --- | --- | --- | --- | --- |")
    for point in POINTS:
        print(line(point, predicted(point)))
    for memory in MEMORY_POINTS:
        print(memory_line(memory, *planned_bytes(memory)))


if __name__ == "__main__":
    main()
