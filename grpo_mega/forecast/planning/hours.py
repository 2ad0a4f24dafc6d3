"""The time of a run as JSON: seconds of a step by phase, what limits it, hours and GPU-hours."""

from __future__ import annotations

from typing import Any

from grpo_mega.config.schema import REWARD_MODELS, AlgorithmConfig, Config, LayoutConfig, ModelConfig
from grpo_mega.forecast.planning.hardware import machines_of
from grpo_mega.forecast.planning.lines import problems_at_hand
from grpo_mega.forecast.planning.plan import planned_vocabulary, roles_of
from grpo_mega.forecast.planning.time import Assumed, Job, StepTime, run_time
from grpo_mega.rollout.sglang.memory import plan_engine
from grpo_mega.rollout.stream import Slices, slices_of

WIDE = 2048
"""Width of the narrowest experts for which a published run gained as much from `layout.fp8` as planned."""
DOMINATES = 0.5
"""Share of generation above which the longest completion alone is reported as its limit."""


def hours(config: Config, planned: dict[str, Any], assumed: Assumed) -> dict[str, Any] | None:
    """The time of a run that `plan.plan` planned; None when nothing can be said.

    That is when `cluster.gpu` is null, a reward model is trained, there are no steps, or the engines have no room for
    their longest sequence.

    Raises:
        InputError: The mean length of completions is beyond the longest.
    """
    if config.run.trains in REWARD_MODELS or not config.run.steps or (job := job_of(config, planned)) is None:
        return None
    room = cache_room(job, planned["engine"])
    if room < config.model.context:
        return None
    kinds, slices = run_time(job, room, assumed), slices_of(config.rollout, config.algorithm.prompts_per_step)
    seconds = sum(kind.steps * kind.seconds for kind in kinds)
    assumptions = assumptions_of(config.model, config.layout, config.algorithm, assumed)
    return {
        "gpu": config.cluster.gpu,
        "prompt": assumed.prompt,
        "signal": 1.0 if config.algorithm.groups_without_signal == "count" else assumed.signal,
        "kinds": [_kind(kind, slices) for kind in kinds],
        "hours": seconds / 3600,
        "gpu_hours": seconds / 3600 * job.machines.gpus,
        "prompts": sum(kind.steps * kind.groups for kind in kinds),
        "problems": problems_at_hand(config.data),
        "warnings": [*assumptions, *(line for kind in kinds for line in warnings_of(kind))],
    }


def job_of(config: Config, planned: dict[str, Any]) -> Job | None:
    """The run that `plan.plan` planned; None when `cluster.gpu` does not say on which GPUs."""
    machines = machines_of(config.cluster, planned["gpus"])
    if machines is None:
        return None
    vocab_size = planned_vocabulary(config.model, config.data)
    return Job(config, roles_of(config, vocab_size, machines.gpus), vocab_size, machines)


def cache_room(job: Job, engine: dict[str, Any] | None) -> float:
    """Tokens that the KV caches of an engine hold; `engine` is what `plan.engine_of` says.

    0 where the size of the GPUs is not given; the embedded engine's cache is as large as its sequences need.
    """
    config = job.config
    if config.rollout.engine != "sglang":
        return float(config.rollout.concurrent_sequences * config.model.context)
    if engine:
        return float(engine["tokens"])
    mib = config.cluster.gpu_memory_mib
    # Without an `engine` to plan beside a trainer, the engines have GPUs to themselves.
    return float(plan_engine(config, job.vocab_size, 0.0, mib * 2**20)["tokens"]) if mib else 0.0


def _kind(step: StepTime, slices: Slices) -> dict[str, Any]:
    rollout, sliced = step.rollout, step.rollout.sliced
    of_slices = (
        {
            "slices": {
                "tokens": slices.tokens,
                "without": rollout.slowest.seconds,
                "age": sliced.age,
                "oldest": sliced.oldest,
                "most_steps_late": slices.most_steps_late(step.longest),
                "in_flight": sliced.in_flight,
            }
        }
        if sliced
        else {}
    )
    return of_slices | {
        "steps": step.steps,
        "longest": step.longest,
        "completion": step.completion,
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
            "at_once": sliced.most if sliced else rollout.slowest.most,
            "waves": rollout.slowest.waves,
            "evicted": rollout.evicted,
            "alone": rollout.alone,
            "tail": rollout.slowest.seconds - rollout.level,
        },
    }


def assumptions_of(model: ModelConfig, layout: LayoutConfig, algorithm: AlgorithmConfig, assumed: Assumed) -> list[str]:
    """Warnings about what the times assume and the settings may contradict."""
    lines = []
    # Row 21 of the table in docs/planner.md: narrow experts gained less from 8 bits on H100 than planned.
    if layout.fp8 and model.moe.experts and model.moe.ffn_hidden < WIDE:
        lines.append(
            f"layout.fp8=true may gain less than planned: experts here have {model.moe.ffn_hidden:,} channels; a "
            f"published run gained 26 % with {WIDE:,}, as planned, but only 11 % with 1,536 on H100. Compare with "
            "layout.fp8=false"
        )
    rule = algorithm.groups_without_signal
    effect = {"drop": "are dropped", "refill": "are replaced by further prompts"}.get(rule)
    drawn, learned = assumed.groups(algorithm)
    if rule == "refill" and learned < algorithm.prompts_per_step:
        lines.append(
            f"algorithm.refill_limit={algorithm.refill_limit} is reached: a step draws {drawn:,} prompts and learns "
            f"from {learned:,} instead of algorithm.prompts_per_step={algorithm.prompts_per_step}"
        )
    elif effect and assumed.signal >= 1:
        lines.append(
            f"groups without signal {effect} (algorithm.groups_without_signal={rule}), but these figures assume that "
            "all groups have signal; give their share with --signal"
        )
    return lines


def bound(step: StepTime) -> str:
    """The longest phase of a step and its largest part, in words."""
    phase = max(step.phases, key=lambda phase: phase.seconds)
    part, seconds = max(phase.parts.items(), key=lambda item: item[1])
    return f"{phase.name}, {phase.seconds / step.seconds:.0%} of a step; {part} {seconds / phase.seconds:.0%} of it"


def warnings_of(step: StepTime) -> list[str]:
    """Warnings about the generation of such a step."""
    rollout, lines = step.rollout, []
    generation = rollout.slowest.seconds
    # In slices nothing waits for the longest completion.
    if rollout.sliced is None and rollout.alone > DOMINATES * generation:
        lines.append(
            f"a completion of {step.longest:,} tokens takes {rollout.alone:,.0f} s when nothing else runs, "
            f"{rollout.alone / generation:.0%} of generation: more GPUs do not shorten it. Lower "
            "rollout.max_new_tokens, or choose engines with faster steps"
        )
    if rollout.evicted:
        lines.append(
            f"the KV cache overflows: {rollout.evicted:,} times per step a completion loses its place and is read "
            "again, which the hours include; see whether they fall with a larger rollout.sglang.tp, or a lower "
            f"{'rollout.in_flight (if it is set) or ' * (rollout.sliced is not None)}"
            "rollout.sglang.arguments.max_running_requests"
        )
    return lines
