"""Prints plans: memory, hours and GPU-hours of a run, layouts."""

from __future__ import annotations

import json
from typing import Any

from grpo_mega.forecast.planning.lines import engine_verdict, host_verdict, in_gb, parameters, verdict

CHANGES = 6
"""Most changes that are printed."""
FINE = 0.05
"""Parts of a phase below this share of a step get no line."""


def show(planned: dict[str, Any]) -> None:
    """Prints a plan as text."""
    layout, stages = planned["layout"], planned["stages"]
    adapters = f"; {planned['adapters']:,} of adapters are trained" if planned["adapters"] else ""
    print(f"{planned['experiment']}: {parameters(planned)}{adapters}")
    sizes = " x ".join(f"{name} {layout[name]}" for name in ("tp", "pp", "vpp", "cp", "dp") if layout[name] > 1)
    experts = f"; experts ep {layout['ep']} x etp {layout['etp']}" if layout["ep"] * layout["etp"] > 1 else ""
    tokens = layout["micro_batch_tokens"] // layout["cp"]
    print(f"{planned['gpus']} GPUs: {sizes or 'one rank'}{experts}; up to {tokens:,} tokens of a micro-batch on each\n")
    _row("a GPU of pipeline stage", range(len(stages)))
    _row("layers", [s["layers"] for s in stages])
    if any(s["predictors"] for s in stages):
        _row("prediction modules", [s["predictors"] for s in stages])
    _row("parameters", [f"{s['dense'] + s['experts']:,}" for s in stages])
    for name in ("dense", "experts"):
        if any(s[name] for s in stages):
            _row(f"  {name}", [f"{s[name]:,}" for s in stages])
            replicas = "replicas" if name == "dense" else "expert_replicas"
            _row("    GPUs with a copy", [s[replicas] for s in stages])
    print("GB")
    _row("counted", [in_gb(size) for size in planned["static"]])
    for name in planned["memory"][0]:
        _row(f"  {name}", [in_gb(lines[name]) for lines in planned["memory"]])
    _row("in all", [in_gb(size) for size in planned["total"]])
    # 1 GB/s writes 60e9 bytes in a minute and 600e9 in ten.
    size = planned["checkpoint"]
    print(
        f"\na checkpoint: {in_gb(size)} GB; writing it takes {size / 60e9:.0f} minutes at 1 GB/s, or needs "
        f"{size / 600e9:.1f} GB/s to take 10 minutes"
    )
    print(
        f"{verdict(planned)}\nmain memory of a machine during generation: {in_gb(planned['host'])} GB, "
        f"and {in_gb(planned['saving'])} GB more until a checkpoint is written"
    )
    if planned["main_memory"]:
        print(host_verdict(planned))
    print(
        f"disk: {in_gb(planned['disk'])} GB for checkpoints kept at once, and exports; --dry-run compares it with the "
        "free space"
    )
    if planned["engine"]:
        _show_engine(planned["engine"])


def _show_engine(engine: dict[str, Any]) -> None:
    """Prints the memory while the engines have the GPUs."""
    print(f"\n{engine['engines']} SGLang engines")
    moments = [engine["hand-over"], engine["generation"]]
    _row("GB on a GPU", ["weights arrive", "generation"])
    for name in moments[0]:
        _row(f"  {name}", [in_gb(lines[name]) for lines in moments])
    _row("in all", [in_gb(sum(lines.values())) for lines in moments])
    cached = f"{engine['tokens']:,} tokens of {engine['cache_bytes']:,} bytes"
    print(f"\nan engine's cache holds {cached}: {engine['longest']} of the longest sequences at once")
    print(f"an engine gets up to {engine['samples']:,} samples at once; those without room wait")
    print(engine_verdict(engine))


def _row(name: str, values: Any) -> None:
    """Prints a line of a table."""
    print(f"{name:<40}" + "".join(f"{value!s:>16}" for value in values))


def show_changes(changes: list[dict[str, Any]]) -> None:
    """Prints the changes with which a run would fit."""
    if changes:
        print("\nit would fit with one of these changes:")
    for change in changes[:CHANGES]:
        print(f"    {as_words(change['settings'])}    ({in_gb(change['bytes'])} GB)")


def show_layouts(searched: dict[str, Any]) -> None:
    """Prints the result of `choice.search`."""
    print(
        f"{searched['gpus']} GPUs ({searched['gpu']}): {searched['tried']:,} layouts can run, {searched['fit']:,} fit "
        f"{in_gb(searched['limit'])} GB; seconds of a step, without the hand-over of weights and GPUs\n"
    )
    first = searched["layouts"][0]
    for number, layout in enumerate(searched["layouts"], start=1):
        print(f"{number:>2}  {layout['seconds']:>10,.1f} s  {in_gb(layout['bytes']):>6} GB  {_sizes(layout['layout'])}")
        if layout["more"]:
            most = [*layout["more"].items()][:2]
            print(f"{'':>6}slower by {', '.join(f'{seconds:,.1f} s of {name}' for name, seconds in most)}")
    if faster := searched["faster"]:
        beyond = f"{faster['seconds']:,.1f} s and {in_gb(faster['bytes'])} GB"
        print(f"\nfaster, if it fitted: {_sizes(faster['layout'])}, {beyond}")
    if searched["engines"]:
        engines = "; ".join(f"{name} {seconds:,.1f} s" for name, seconds in searched["engines"].items())
        print(f"\nwith the engines of the first: {engines}")
    if any(layout["seconds"] < first["seconds"] for layout in searched["layouts"]):
        print("\nthe first splits the model least of the layouts that are nearly the fastest")
    print(f"\nsettings of the first: {as_words(searched['settings']) or 'unchanged'}")


def as_words(settings: dict[str, Any]) -> str:
    """Settings as on a command line."""
    return " ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())


def _sizes(layout: dict[str, Any]) -> str:
    sizes = " x ".join(f"{name} {layout[name]}" for name in ("tp", "pp", "cp", "ep") if layout[name] > 1)
    return (
        f"{sizes or 'data parallelism alone'}, recompute {layout['recompute']}, "
        f"micro-batches of {layout['micro_batch_tokens']:,} tokens"
    )


def show_hours(time: dict[str, Any], gpus: int) -> None:
    """Prints the result of `hours.hours`."""
    # A column for each kind of step, which differ in the limit on completions.
    kinds = time["kinds"]
    completions = " and ".join(f"{kind['completion']:,.0f} of {kind['longest']:,}" for kind in kinds)
    signal = f", and {time['signal']:.0%} of groups have signal" if time["signal"] < 1 else ""
    print(
        f"\ntime on {time['gpu'].upper()}, if prompts have {time['prompt']} tokens and completions on average "
        f"{completions}{signal}"
    )
    _row("steps", [f"{kind['steps']:,}" for kind in kinds] + ["GPU-hours"])
    print("seconds of a step")
    for name in dict.fromkeys(phase["name"] for kind in kinds for phase in kind["phases"]):
        phases = [next((p for p in kind["phases"] if p["name"] == name), None) for kind in kinds]
        _seconds_row(f"  {name}", kinds, [phase["seconds"] if phase else 0.0 for phase in phases], gpus)
        parts = dict.fromkeys(part for phase in phases if phase for part in phase["parts"])
        for part in parts:
            seconds = [phase["parts"].get(part, 0.0) if phase else 0.0 for phase in phases]
            if len(parts) > 1 and any(s > FINE * kind["seconds"] for s, kind in zip(seconds, kinds, strict=True)):
                _seconds_row(f"    {part}", kinds, seconds, gpus)
    _seconds_row("in all", kinds, [kind["seconds"] for kind in kinds], gpus)
    # Generation, and what a run adds up to.
    _row("tokens per second and GPU", [f"{kind['tokens'] / kind['seconds'] / gpus:,.0f}" for kind in kinds])
    _row("completions at once in an engine", [f"{kind['engine']['at_once']:,}" for kind in kinds])
    _row("waves of completions", [f"{kind['engine']['waves']:.1f}" for kind in kinds])
    _row("KV cache", ["overflows" if kind["engine"]["evicted"] else "has room" for kind in kinds])
    prompts, problems = time["prompts"], time["problems"]
    passes = f", each of {problems:,} problems {prompts / problems:.1f} times" if problems else ""
    print(f"\nthe run: {time['hours']:,.1f} hours, {time['gpu_hours']:,.0f} GPU-hours, {prompts:,} prompts{passes}")
    for kind in kinds:
        print(f"what limits a step with completions up to {kind['longest']:,} tokens: {kind['bound']}")
        if slices := kind.get("slices"):
            faster = slices["without"] / kind["phases"][0]["seconds"]
            print(
                f"slices of {slices['tokens']:,} tokens: generation takes {slices['without']:,.1f} s without them, "
                f"{faster:.2f} times as long; a token is {slices['age']:.1f} steps old on average when it is learned, "
                f"at most {slices['oldest']} (bound: {slices['most_steps_late']}); {slices['in_flight']:,.0f} samples "
                "wait for later steps"
            )
    for line in time["warnings"]:
        print(f"warning: {line}")


def _seconds_row(name: str, kinds: list[dict[str, Any]], seconds: list[float], gpus: int) -> None:
    """Prints seconds for each kind of step, and the GPU-hours of all steps."""
    total = sum(kind["steps"] * s for kind, s in zip(kinds, seconds, strict=True))
    _row(name, [f"{s:,.1f}" for s in seconds] + [f"{total * gpus / 3600:,.0f}"])
