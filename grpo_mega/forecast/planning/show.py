"""A plan as text, for people: memory, and the hours and GPU-hours of the run."""

from __future__ import annotations

import json
from typing import Any

from grpo_mega.forecast.planning.verdict import engine_verdict, host_verdict, in_gb, verdict

CHANGES = 6
"""Changes that are told at most."""


def show(planned: dict[str, Any]) -> None:
    """Prints a plan as text."""
    layout, stages = planned["layout"], planned["stages"]
    predictors = (
        f", and {planned['prediction_parameters']:,} of prediction modules" if planned["prediction_parameters"] else ""
    )
    adapters = f"; {planned['adapters']:,} of adapters are trained" if planned["adapters"] else ""
    print(f"{planned['experiment']}: {planned['parameters']:,} parameters{predictors}{adapters}")
    sizes = " x ".join(f"{name} {layout[name]}" for name in ("tp", "pp", "vpp", "cp", "dp") if layout[name] > 1)
    experts = f"; experts ep {layout['ep']} x etp {layout['etp']}" if layout["ep"] * layout["etp"] > 1 else ""
    tokens = layout["micro_batch_tokens"] // layout["cp"]
    print(f"{planned['gpus']} GPUs: {sizes or 'one rank'}{experts}; up to {tokens:,} tokens of a micro-batch on each\n")
    row("a GPU of pipeline stage", range(len(stages)))
    row("layers", [s["layers"] for s in stages])
    if any(s["predictors"] for s in stages):
        row("prediction modules", [s["predictors"] for s in stages])
    row("parameters", [f"{s['dense'] + s['experts']:,}" for s in stages])
    for name in ("dense", "experts"):
        if any(s[name] for s in stages):
            row(f"  {name}", [f"{s[name]:,}" for s in stages])
            replicas = "replicas" if name == "dense" else "expert_replicas"
            row("    GPUs with a copy", [s[replicas] for s in stages])
    print("GB")
    row("counted", [in_gb(size) for size in planned["static"]])
    for name in planned["memory"][0]:
        row(f"  {name}", [in_gb(lines[name]) for lines in planned["memory"]])
    row("in all", [in_gb(size) for size in planned["total"]])
    size = planned["checkpoint"]
    print(
        f"\na checkpoint: {in_gb(size)} GB; writing it takes {size / 60e9:.0f} minutes at 1 GB/s, and "
        f"{size / 600e9:.1f} GB/s to do so in 10 minutes"
    )
    print(
        f"{verdict(planned)}\nmain memory of a machine while an engine has its GPUs: {in_gb(planned['host'])} GB; "
        f"until a checkpoint is written {in_gb(planned['saving'])} GB more"
    )
    if planned["main_memory"]:
        print(host_verdict(planned))
    print(
        f"disk: {in_gb(planned['disk'])} GB for the checkpoints that lie there at once, and exports; "
        "--dry-run compares it with what is free"
    )
    if planned["engine"]:
        show_engine(planned["engine"])


def show_engine(engine: dict[str, Any]) -> None:
    """Prints the memory while the engines have the GPUs."""
    print(f"\n{engine['engines']} SGLang engines")
    moments = [engine["hand-over"], engine["generation"]]
    row("GB on a GPU", ["weights arrive", "generation"])
    for name in moments[0]:
        row(f"  {name}", [in_gb(lines[name]) for lines in moments])
    row("in all", [in_gb(sum(lines.values())) for lines in moments])
    cached = f"{engine['tokens']:,} tokens of {engine['cache_bytes']:,} bytes"
    print(f"\nan engine's cache holds {cached}: {engine['longest']} of the longest sequences at once")
    print(f"an engine gets up to {engine['samples']:,} samples of a step; those that do not fit wait")
    print(engine_verdict(engine))


def row(name: str, values: Any) -> None:
    """Prints a line of a table."""
    print(f"{name:<40}" + "".join(f"{value!s:>16}" for value in values))


def show_changes(changes: list[dict[str, Any]]) -> None:
    """Prints the changes with which a run would fit."""
    if changes:
        print("\nit would fit with one of these:")
    for change in changes[:CHANGES]:
        print(f"    {as_words(change['settings'])}    ({in_gb(change['bytes'])} GB)")


def show_layouts(found: dict[str, Any]) -> None:
    """Prints the layouts that a search found."""
    print(
        f"{found['gpus']} GPUs ({found['gpu']}): {found['tried']:,} layouts can run, {found['fit']:,} fit "
        f"{in_gb(found['limit'])} GB; seconds are those of a step, without the hand-over of weights and GPUs\n"
    )
    for number, layout in enumerate(found["layouts"], start=1):
        print(f"{number:>2}  {layout['seconds']:>10,.1f} s  {in_gb(layout['bytes']):>6} GB  {_sizes(layout['layout'])}")
        if layout["more"]:
            print(f"{'':>6}slower by {_most(layout['more'])}")
    if faster := found["faster"]:
        beyond = f"{faster['seconds']:,.1f} s and {in_gb(faster['bytes'])} GB"
        print(f"\nfaster, if it fitted: {_sizes(faster['layout'])}, {beyond}")
    if found["engines"]:
        engines = "; ".join(f"{name} {seconds:,.1f} s" for name, seconds in found["engines"].items())
        print(f"\nwith the engines of the first: {engines}")
    if any(layout["seconds"] < found["layouts"][0]["seconds"] for layout in found["layouts"]):
        print("\nthe first splits the model least of those whose seconds are nearly the fewest")
    print(f"\nthe settings of the first: {as_words(found['settings']) or 'those that are set'}")


def as_words(settings: dict[str, Any]) -> str:
    """Settings as on a command line."""
    return " ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())


def _sizes(layout: dict[str, Any]) -> str:
    sizes = " x ".join(f"{name} {layout[name]}" for name in ("tp", "pp", "cp", "ep") if layout[name] > 1)
    return (
        f"{sizes or 'data parallelism alone'}, recompute {layout['recompute']}, "
        f"micro-batches of {layout['micro_batch_tokens']:,} tokens"
    )


def _most(more: dict[str, float], count: int = 2) -> str:
    return ", ".join(f"{seconds:,.1f} s of {name}" for name, seconds in [*more.items()][:count])


FINE = 0.05
"""Parts of a phase below this share of a step have no line of their own."""


def show_hours(found: dict[str, Any], gpus: int) -> None:
    """Prints what `hours.hours` found."""
    kinds = found["kinds"]
    answers = " and ".join(f"{kind['answer']:,.0f} of {kind['longest']:,}" for kind in kinds)
    signal = f", and {found['signal']:.0%} of groups signal" if found["signal"] < 1 else ""
    print(
        f"\ntime on {found['gpu'].upper()}, if prompts have {found['prompt']} tokens and answers on average "
        f"{answers}{signal}"
    )
    row("steps", [f"{kind['steps']:,}" for kind in kinds] + ["GPU-hours"])
    print("seconds of a step")
    for name in dict.fromkeys(phase["name"] for kind in kinds for phase in kind["phases"]):
        phases = [next((p for p in kind["phases"] if p["name"] == name), None) for kind in kinds]
        _line(f"  {name}", kinds, [phase["seconds"] if phase else 0.0 for phase in phases], gpus)
        parts = dict.fromkeys(part for phase in phases if phase for part in phase["parts"])
        for part in parts:
            seconds = [phase["parts"].get(part, 0.0) if phase else 0.0 for phase in phases]
            if len(parts) > 1 and any(s > FINE * kind["seconds"] for s, kind in zip(seconds, kinds, strict=True)):
                _line(f"    {part}", kinds, seconds, gpus)
    _line("in all", kinds, [kind["seconds"] for kind in kinds], gpus)
    row("tokens a second and GPU", [f"{kind['tokens'] / kind['seconds'] / gpus:,.0f}" for kind in kinds])
    row("answers at once in an engine", [f"{kind['engine']['at_once']:,}" for kind in kinds])
    row("waves of answers", [f"{kind['engine']['waves']:.1f}" for kind in kinds])
    row("KV cache", [f"{'overflows' if kind['engine']['evicted'] else 'has room'}" for kind in kinds])
    prompts, problems = found["prompts"], found["problems"]
    passes = f", each of {problems:,} problems {prompts / problems:.1f} times" if problems else ""
    print(f"\nthe run: {found['hours']:,.1f} hours, {found['gpu_hours']:,.0f} GPU-hours, {prompts:,} prompts{passes}")
    for kind in kinds:
        print(f"what bounds a step with answers up to {kind['longest']:,} tokens: {kind['bound']}")
    for line in found["warnings"]:
        print(f"warning: {line}")


def _line(name: str, kinds: list[dict[str, Any]], seconds: list[float], gpus: int) -> None:
    """A row of seconds for each kind of step, and the GPU-hours of all steps."""
    total = sum(kind["steps"] * s for kind, s in zip(kinds, seconds, strict=True))
    row(name, [f"{s:,.1f}" for s in seconds] + [f"{total * gpus / 3600:,.0f}"])
