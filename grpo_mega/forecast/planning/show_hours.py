"""The time of a run as text, for people."""

from __future__ import annotations

from typing import Any

from grpo_mega.forecast.planning.show import row

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
