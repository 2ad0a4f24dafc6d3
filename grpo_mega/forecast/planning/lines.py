"""What a plan tells without building anything: names of its lines, verdicts, room on the disk, problems in files.

Readers of plans (dry run, rehearsal, reports) import this file without Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm
from pathlib import Path
from typing import Any

from grpo_mega.config.schema import DataConfig, RunConfig
from grpo_mega.data.records import records
from grpo_mega.data.stored import sources_of

LIBRARIES, ASLEEP, DEEPEP = "libraries", "engine, asleep", "DeepEP's buffers"
EXPORTS = "exports, beyond these"
"""Tensors of the trainer, but between two steps."""
OTHERS = (LIBRARIES, ASLEEP, DEEPEP)
"""Lines of `memory.memory` that are not tensors of the trainer."""
MAIN_MEMORY = 0.9
"""Share of a machine's main memory that a plan may use; the rest is for the system and the processes."""


def of_the_trainer(lines: Mapping[str, float]) -> float:
    """Peak bytes of the trainer's tensors in a step, from the lines of one pipeline stage."""
    return sum(size for name, size in lines.items() if name not in (*OTHERS, EXPORTS))


def in_gb(size: float) -> str:
    """Bytes as text, in GB with one decimal, or with three if one would show nothing of them."""
    return f"{size / 1e9:.1f}" if size >= 0.05e9 or not size else f"{size / 1e9:.3f}"


def parameters(planned: dict[str, Any]) -> str:
    """The number of parameters, as text."""
    predictors = planned["prediction_parameters"]
    return f"{planned['parameters']:,} parameters" + (f", and {predictors:,} of prediction modules" * bool(predictors))


def verdict(planned: dict[str, Any]) -> str:
    """One line: whether the trainer fits its GPUs, and by how much."""
    most, stages = max(planned["total"]), len(planned["total"])
    where = f"pipeline stage {planned['total'].index(most)} " * (stages > 1) + f"takes {in_gb(most)} GB"
    if planned["capacity"] is None:
        return f"{where}, plus the GPU's libraries; cluster.gpu_memory_mib or cluster=h100 says whether it fits"
    limit = planned["limit"]
    spare = f"{in_gb(abs(limit - most))} GB {'to spare' if planned['fits'] else 'too much'}"
    return (
        f"{'fits' if planned['fits'] else 'does not fit'}: {where} of the {in_gb(limit)} GB that may be planned on a "
        f"GPU with {in_gb(planned['capacity'])} GB; {spare}"
    )


def host_verdict(planned: dict[str, Any]) -> str:
    """One line: whether a machine's main memory holds what leaves its GPUs, which is pinned, and a checkpoint."""
    numbers = (
        f"{in_gb(planned['host'])} GB of pinned memory and {in_gb(planned['saving'])} GB for a checkpoint, of a "
        f"machine's {in_gb(planned['main_memory'])} GB of main memory, {MAIN_MEMORY:.0%} of which may be planned"
    )
    if planned["host_fits"]:
        return f"fits: {numbers}"
    return f"does not fit: {numbers}; spread the model over more machines (cluster.nodes, with layout.ep or layout.pp)"


def engine_verdict(engine: dict[str, Any]) -> str:
    """One line: whether the engines fit their GPUs."""
    if engine["fits"] and engine["waiting"]:
        return (
            f"fits, but the KV cache has no room for {engine['waiting']:,} of the {engine['samples']:,} samples in "
            "flight of an engine while all fill their slices, and these wait"
            f"{'; lower rollout.in_flight' * engine['could_be_fewer']}"
        )
    if engine["fits"]:
        return "fits: there is room to receive weights and to generate"
    if engine["excess"]:
        return (
            f"does not fit: generation takes {in_gb(engine['excess'])} GB more than a GPU has; lower "
            "rollout.sglang.arguments.mem_fraction_static"
        )
    if engine["longest"]:
        return f"does not fit: {in_gb(engine['peak'])} GB are too much while weights arrive; raise rollout.sglang.tp"
    return "does not fit: the KV cache has no room for a sequence of model.context tokens; raise rollout.sglang.tp"


def checkpoints_at_once(run: RunConfig) -> int:
    """Most checkpoints of its last stage that the run directory holds at once, with the one being written."""
    # A run without steps of its last stage still writes one checkpoint. The last step is saved whatever `save_every`.
    steps = max(1, run.steps)
    every = run.save_every or steps
    before = -(-steps // every) - 1
    newest = min(before, run.keep_checkpoints)
    # Every `keep_every`-th step is kept forever, if it is saved at all; the newest ones are counted already.
    milestones = (before - newest) * every // lcm(every, run.keep_every) if run.keep_every else 0
    return newest + milestones + 1


def exports_in_all(run: RunConfig) -> int:
    """Number of exports that a run writes; it keeps all."""
    return 1 if run.export_every < 0 else -(-max(1, run.steps) // run.export_every) if run.export_every else 0


def problems_at_hand(data: DataConfig) -> int | None:
    """Training problems that come again in every epoch, with those that are held out for validation.

    None when problems are generated without end, or a file is missing here.

    Raises:
        InputError: A file cannot be read.
    """
    if data.task != "jsonl":
        return data.train_size
    count = 0
    for source in sources_of(data).values():
        if source.reasoning_gym:
            count += source.problems
        elif source.path is not None:
            if not Path(source.path).exists():
                return None
            count += sum(1 for _ in records(source.path, source.split))
    return count or None
