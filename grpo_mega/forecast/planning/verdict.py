"""Whether a plan fits, in a line each for the trainer and its engines."""

from __future__ import annotations

from typing import Any

from grpo_mega.forecast.planning.supplies import MAIN_MEMORY


def verdict(planned: dict[str, Any]) -> str:
    """One line: whether the trainer's memory fits, and by how much."""
    most = max(planned["total"])
    where = f"stage {planned['total'].index(most)} takes {in_gb(most)} GB"
    if planned["capacity"] is None:
        return f"{where}, beside a GPU's libraries; give cluster.gpu_memory_mib, or cluster=h100, for a verdict"
    limit = planned["limit"]
    spare = f"{in_gb(abs(limit - most))} GB {'to spare' if planned['fits'] else 'too much'}"
    return (
        f"{'fits' if planned['fits'] else 'does not fit'}: {where}, and {in_gb(limit)} GB of a GPU's "
        f"{in_gb(planned['capacity'])} may be planned; {spare}"
    )


def host_verdict(planned: dict[str, Any]) -> str:
    """One line: whether a machine has main memory for what leaves its GPUs, which is pinned, and for a checkpoint."""
    said = (
        f"{in_gb(planned['host'])} GB of a machine's {in_gb(planned['main_memory'])} as pinned memory, "
        f"{in_gb(planned['saving'])} for a checkpoint, and {MAIN_MEMORY:.0%} may be planned"
    )
    if planned["host_fits"]:
        return f"fits: {said}"
    return f"does not fit: {said}; spread the model over more machines (cluster.nodes, with layout.ep or layout.pp)"


def engine_verdict(engine: dict[str, Any]) -> str:
    """One line: whether the engine's memory fits."""
    if engine["fits"]:
        return "fits: there is room to hand weights over, and to generate"
    if engine["excess"]:
        return (
            f"does not fit: generation takes {in_gb(engine['excess'])} GB more than a GPU has; lower "
            "rollout.sglang.arguments.mem_fraction_static"
        )
    if engine["longest"]:
        return f"does not fit: {in_gb(engine['peak'])} GB are too much while weights arrive; raise rollout.sglang.tp"
    return "does not fit: no sequence of model.context tokens has room in the KV cache; raise rollout.sglang.tp"


def in_gb(size: float) -> str:
    """Bytes as text, in GB with one decimal."""
    return f"{size / 1e9:.1f}"
