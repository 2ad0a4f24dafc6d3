"""The time of a run as JSON: seconds of a step by phase, what bounds it, hours and GPU-hours."""

from __future__ import annotations

from typing import Any

from grpo_mega.config.schema import REWARD_MODELS, Config
from grpo_mega.forecast.planning.hardware import machines_of
from grpo_mega.forecast.planning.plan import roles_of, vocabulary
from grpo_mega.forecast.planning.supplies import problems_at_hand
from grpo_mega.forecast.planning.time import Assumed, StepTime, run_time
from grpo_mega.rollout.sglang.memory import plan_engine

WIDE = 2048
"""Narrowest experts for which a published run gained from `layout.fp8` what is planned."""
DOMINATES = 0.5
"""Share of generation from which on the longest answer alone is called what bounds it."""


def hours(config: Config, planned: dict[str, Any], assumed: Assumed) -> dict[str, Any] | None:
    """The time of a run that `plan.plan` planned; None when `cluster.gpu` is null, a reward model is trained, there are
    no steps, or its engines have no room for their longest sequence.

    Raises:
        ValueError: Answers are meant to be longer than they may be.
    """
    machines = machines_of(config.cluster, planned["gpus"])
    if machines is None or config.run.trains in REWARD_MODELS or not config.run.steps:
        return None
    vocab_size = vocabulary(config)
    room = cache_room(config, planned, vocab_size)
    if room < config.model.context:
        return None
    steps = run_time(config, roles_of(config, vocab_size, machines.gpus), vocab_size, machines, room, assumed)
    seconds = sum(kind.steps * kind.seconds for kind in steps)
    return {
        "gpu": config.cluster.gpu,
        "prompt": assumed.prompt,
        "signal": 1.0 if config.algorithm.groups_without_signal == "count" else assumed.signal,
        "kinds": [_kind(kind) for kind in steps],
        "hours": seconds / 3600,
        "gpu_hours": seconds / 3600 * machines.gpus,
        "prompts": sum(kind.steps * kind.groups for kind in steps),
        "problems": problems_at_hand(config),
        "warnings": [*assumptions(config, assumed), *(line for kind in steps for line in warnings_of(kind))],
    }


def cache_room(config: Config, planned: dict[str, Any], vocab_size: int) -> float:
    """Tokens that the KV caches of an engine hold; the embedded engine's is as large as its sequences need."""
    if config.rollout.engine != "sglang":
        return float(config.rollout.concurrent_sequences * config.model.context)
    if planned["engine"]:
        return float(planned["engine"]["tokens"])
    if planned["capacity"] is None:
        return 0.0
    return float(plan_engine(config, vocab_size, 0.0, planned["capacity"])["tokens"])


def _kind(step: StepTime) -> dict[str, Any]:
    rollout = step.rollout
    return {
        "steps": step.steps,
        "longest": step.longest,
        "answer": step.answer,
        "groups": step.groups,
        "tokens": step.tokens,
        "seconds": step.seconds,
        "phases": [
            {"name": phase.name, "seconds": phase.seconds, "parts": phase.parts}
            | ({"micro_batches": phase.slots.micros, "stage": phase.slots.stage} if phase.slots else {})
            for phase in step.phases
        ],
        "bound": bound(step),
        "engine": {
            "engines": rollout.engines,
            "at_once": rollout.slowest.most,
            "waves": rollout.slowest.waves,
            "evicted": rollout.evicted,
            "alone": rollout.alone,
            "tail": rollout.slowest.seconds - rollout.level,
        },
    }


def assumptions(config: Config, assumed: Assumed) -> list[str]:
    """What the times take for granted though settings depend on it, in words."""
    return [*_of_narrow_products(config), *_of_groups(config, assumed)]


def _of_narrow_products(config: Config) -> list[str]:
    """A line where `layout.fp8` may gain less than planned, see row 21 of `published.py`."""
    moe = config.model.moe
    if not (config.layout.fp8 and moe.experts and moe.ffn_hidden < WIDE):
        return []
    return [
        f"layout.fp8=true may gain less than planned: experts here have {moe.ffn_hidden:,} channels; a published run "
        f"gained 26 % with {WIDE:,}, as planned, but only 11 % with 1,536 on H100. Compare with layout.fp8=false"
    ]


def _of_groups(config: Config, assumed: Assumed) -> list[str]:
    algorithm, rule = config.algorithm, config.algorithm.groups_without_signal
    what = {"drop": "are not learned from", "refill": "draw further prompts"}.get(rule)
    drawn, learned = assumed.groups(config)
    if rule == "refill" and learned < algorithm.prompts_per_step:
        return [
            f"algorithm.refill_limit={algorithm.refill_limit} is reached: a step draws {drawn:,} prompts and learns "
            f"from {learned:,}, not from algorithm.prompts_per_step={algorithm.prompts_per_step}"
        ]
    if what is None or assumed.signal < 1:
        return []
    return [
        f"groups without signal {what} (algorithm.groups_without_signal={rule}): these figures are of steps in which "
        "all have signal; --signal says how many do"
    ]


def bound(step: StepTime) -> str:
    """The longest phase of a step, and what takes most of it, in words."""
    phase = max(step.phases, key=lambda phase: phase.seconds)
    part, seconds = max(phase.parts.items(), key=lambda item: item[1])
    return f"{phase.name}, {phase.seconds / step.seconds:.0%} of a step; {part} {seconds / phase.seconds:.0%} of it"


def warnings_of(step: StepTime) -> list[str]:
    """What a user should know about the generation of such a step."""
    rollout, lines = step.rollout, []
    generation = step.phases[0].seconds
    if rollout.alone > DOMINATES * generation:
        lines.append(
            f"an answer of {step.longest:,} tokens takes {rollout.alone:,.0f} s when nothing else runs, "
            f"{rollout.alone / generation:.0%} of generation: more GPUs do not shorten that. A lower "
            "rollout.max_new_tokens does, and engines that take less time for a token"
        )
    if rollout.evicted:
        lines.append(
            f"the KV cache overflows: {rollout.evicted:,} times a step an answer loses its place and is read again; "
            "raise rollout.sglang.tp, or lower rollout.sglang.arguments.max_running_requests"
        )
    return lines
