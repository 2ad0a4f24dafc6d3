"""Says what a run will take on every GPU, on a laptop and in seconds, before anybody queues.

    python tools/plan.py r1zero_671b
    python tools/plan.py r1zero_671b layout.ep=32 cluster.nodes=128 --json

Composes the experiment with its overrides, checks every rule, and builds the modules of one rank of every pipeline
stage on the meta device. Parameters, weights, gradients and optimizer state are counted; activations and the rest of
the lines are estimates (grpo_mega/planning/memory.py says how). Machines are those of `cluster.*`, or the fewest
processes that have the layout.

With engines that share the GPUs a second table is about their turn (grpo_mega/rollout/sglang/memory.py).

Exit code: 0 the run fits (or nothing is known of the GPUs), 1 it does not, 2 the settings cannot run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what is built here must not land on a GPU

from grpo_mega import platform
from grpo_mega.config.load import compose_config

FITS, TOO_BIG, BAD_INPUT = 0, 1, 2


def show(found: dict[str, Any]) -> None:
    """Prints a plan for people."""
    layout, stages = found["layout"], found["stages"]
    ahead = f", and {found['prediction_parameters']:,} of prediction modules" if found["prediction_parameters"] else ""
    print(f"{found['experiment']}: {found['parameters']:,} parameters{ahead}")
    sizes = " x ".join(f"{name} {layout[name]}" for name in ("tp", "pp", "vpp", "cp", "dp") if layout[name] > 1)
    experts = f"; experts ep {layout['ep']} x etp {layout['etp']}" if layout["ep"] * layout["etp"] > 1 else ""
    tokens = layout["micro_batch_tokens"] // layout["cp"]
    print(f"{found['gpus']} GPUs: {sizes or 'one rank'}{experts}; up to {tokens:,} tokens of a micro-batch on each\n")
    _row("a GPU of pipeline stage", range(len(stages)))
    _row("layers", [s["layers"] for s in stages])
    if any(s["predictors"] for s in stages):
        _row("prediction modules", [s["predictors"] for s in stages])
    _row("parameters", [f"{s['dense'] + s['experts']:,}" for s in stages])
    for name in ("dense", "experts"):
        if any(s[name] for s in stages):
            _row(f"  {name}", [f"{s[name]:,}" for s in stages])
            replicas = "replicas" if name == "dense" else "expert_replicas"
            _row("    on so many GPUs", [s[replicas] for s in stages])
    print("GB")
    _row("counted", [_gb(size) for size in found["static"]])
    for name in found["memory"][0]:
        _row(f"  {name}", [_gb(lines[name]) for lines in found["memory"]])
    _row("in all", [_gb(size) for size in found["total"]])
    size = found["checkpoint"]
    print(
        f"\na checkpoint: {_gb(size)} GB; to write it takes {size / 60e9:.0f} minutes at 1 GB/s, and "
        f"{size / 600e9:.1f} GB/s to do so in 10 minutes"
    )
    print(f"{verdict(found)}\nmain memory of a machine while an engine has its GPUs: {_gb(found['host'])} GB")
    if found["engine"]:
        show_engine(found["engine"])


def show_engine(engine: dict[str, Any]) -> None:
    """Prints the engine's turn."""
    print(f"\n{engine['engines']} SGLang engines")
    moments = [engine["hand-over"], engine["generation"]]
    _row("GB on a GPU", ["weights arrive", "generation"])
    for name in moments[0]:
        _row(f"  {name}", [_gb(lines[name]) for lines in moments])
    _row("in all", [_gb(sum(lines.values())) for lines in moments])
    cached = f"{engine['tokens']:,} tokens of {engine['cache_bytes']:,} bytes"
    print(f"\nan engine's cache holds {cached}: {engine['longest']} of the longest sequences at once")
    print(f"an engine gets up to {engine['samples']:,} samples of a step, what has no room waits for its turn")
    print(engine_verdict(engine))


def engine_verdict(engine: dict[str, Any]) -> str:
    """One line: whether the engine's turn fits."""
    if engine["fits"]:
        return "fits: there is room to hand weights over, and to generate"
    if engine["excess"]:
        return (
            f"does not fit: generation takes {_gb(engine['excess'])} GB more than a GPU has; lower "
            "rollout.sglang.arguments.mem_fraction_static"
        )
    if engine["longest"]:
        return f"does not fit: {_gb(engine['peak'])} GB are too much while weights arrive; raise rollout.sglang.tp"
    return "does not fit: no sequence of model.context tokens has room in the KV cache; raise rollout.sglang.tp"


def verdict(found: dict[str, Any]) -> str:
    """One line: whether it fits, by how much."""
    most = max(found["total"])
    where = f"stage {found['total'].index(most)} takes {_gb(most)} GB"
    if found["capacity"] is None:
        return f"{where}; give cluster.gpu_memory_mib, or cluster=h100, for a verdict"
    limit = found["limit"]
    spare = f"{_gb(abs(limit - most))} GB {'to spare' if found['fits'] else 'too much'}"
    return (
        f"{'fits' if found['fits'] else 'does not fit'}: {where}, and {_gb(limit)} GB of a GPU's "
        f"{_gb(found['capacity'])} may be planned; {spare}"
    )


def _row(name: str, values: Any) -> None:
    print(f"{name:<40}" + "".join(f"{value!s:>16}" for value in values))


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f}"


def main(arguments: list[str]) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", help="a file of configs/experiment, with or without experiment= before it")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as for training")
    parser.add_argument("--json", action="store_true", help="print numbers for programs, in parameters and bytes")
    options = parser.parse_intermixed_args(arguments)
    warnings.filterwarnings("ignore", module="megatron")
    platform.start_planning()
    from grpo_mega.planning.plan import plan  # imports Megatron, which wants the platform prepared

    experiment = options.experiment.removeprefix("experiment=")
    try:
        found = plan(compose_config([f"experiment={experiment}", *options.overrides]))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    print(json.dumps(found)) if options.json else show(found)
    turns = [found["fits"], found["engine"] and found["engine"]["fits"]]
    return TOO_BIG if False in turns else FITS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
