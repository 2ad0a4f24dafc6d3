"""Describes what a run achieved, and where its time goes, for a reader who has never seen a loss curve."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo_mega.config.schema.reward import success_is_share
from grpo_mega.observe.foreign import finite
from grpo_mega.observe.timer import APART
from grpo_mega.show.report.read import STAGES, Metrics, RunData
from grpo_mega.show.report.thin import mean

NO_PHASES = ("step", *APART, "base", "sft")
"""Names under time/ that are not phases of a step of the last stage."""
ADVICE = {
    "generate": "Generation bounds a step: more or faster engines, shorter completions (rollout.max_new_tokens) or "
    "more sequences at once (rollout.concurrent_sequences) shorten it.",
    "update": "The updates bound a step: more ranks, larger micro-batches (layout.micro_batch_tokens) or fewer epochs "
    "and mini-batches shorten it.",
    "reward": "Scoring bounds a step: faster reward functions or more of their services at once shorten it.",
    "reward_model": "The reward model bounds a step: a smaller one shortens it.",
    "logprobs": "Log-probabilities bound a step: with a single update a step the old policy needs none, and with "
    "algorithm.kl_coef=0 the reference needs none.",
    "sync": "Sending weights to the engines bounds a step: see rollout.sglang.transport.",
}
"""Phase -> advice for steps that spend most of their time in it."""


def headline(run: RunData) -> str:
    """One sentence with the result of the run."""
    before, after = accuracies(run)
    steps = last_step(run.metrics)
    measured, shown = success(run)
    if before is not None and after is not None:
        moved = "rose" if after > before else "fell" if after < before else "stayed"
        to = f"at {shown(after)}" if moved == "stayed" else f"from {shown(before)} to {shown(after)}"
        if noise := _noise(run, before, after):
            moved = "went"
        return f"{measured} on problems it never trained on {moved} {to} in {number(steps)} steps{noise}."
    if after is not None:
        return f"{measured} on problems it never trained on is {shown(after)} after {number(steps)} steps."
    rewards = curve(run.metrics, "reward/mean")
    if rewards:
        return f"{number(steps)} steps so far; the reward went from {rewards[0]:.3g} to {rewards[-1]:.3g}."
    if steps:
        return f"{number(steps)} steps are recorded."
    return _earlier_stage(run) or "No training step is recorded yet."


def success(run: RunData) -> tuple[str, Callable[[float], str]]:
    """Name of the success term's measure, and the format of its values: an accuracy in percent, or a term's score."""
    try:
        is_share, term = success_is_share(run.config["reward"]), run.config["reward"]["success"]
    # The configuration may be damaged, or that of a reward model's run.
    except (KeyError, TypeError, AttributeError):
        is_share, term = True, ""
    if is_share:
        return "Accuracy", percent
    return f"The score {term!r}", lambda value: f"{value:.3g}"


def _noise(run: RunData, before: float, after: float) -> str:
    """A clause if the change of an accuracy is within two standard deviations of chance; else empty."""
    problems = finite(run.summary.get("held_out_problems"))
    if not problems or problems < 0 or after == before or success(run)[0] != "Accuracy":
        return ""
    if not 0 <= min(before, after) <= max(before, after) <= 1:
        return ""
    # That of the difference between two shares, each measured on this many problems.
    deviation = math.sqrt((before * (1 - before) + after * (1 - after)) / problems)
    return f", which is within the noise of {number(problems)} problems" if abs(after - before) <= 2 * deviation else ""


def _earlier_stage(run: RunData) -> str:
    """Progress of a run whose last stage has no line yet; empty if no earlier stage has one either."""
    begun = [name for name in STAGES if run.stages.get(name)]
    if run.metrics or not begun:
        return ""
    stage = begun[-1]
    steps = number(last_step(run.stages[stage]))
    if run.summary.get("status") == "completed":
        return f"The run ended with {STAGES[stage].words} ({stage}), after {steps} steps."
    return f"The run is in an earlier stage, {STAGES[stage].words} ({stage}): step {steps}."


def chain(run: RunData) -> str:
    """The stages of the run in order, from the first weights to the last stage, each with its steps and time."""
    origin = setting(run.config, "run.init_from")
    parts = [f"the weights of {origin}" if origin else "random weights"]
    parts += [_stage(STAGES[name].words, metrics) for name, metrics in run.stages.items()]
    trained = str(setting(run.config, "run.trains") or "policy").replace("_", " ")
    if run.metrics:
        learned = "distillation" if setting(run.config, "distill.teacher") else "reinforcement learning"
        parts.append(_stage(learned if trained == "policy" else f"a {trained}'s training", run.metrics))
    return " → ".join(parts)


def _stage(what: str, metrics: Metrics) -> str:
    # No step, for example, where an earlier run left the base model in the cache.
    if not metrics:
        return f"{what} (no step in this run)"
    spent = sum(curve(metrics, "time/step"))
    return f"{what} ({number(last_step(metrics))} steps{f', {duration(spent)}' if spent else ''})"


def sentences(run: RunData) -> list[str]:
    """The story of the run: model and problems, results, time and alarms."""
    parts = [_what(run), _format_and_length(run)]
    rewards = curve(run.metrics, "reward/mean")
    if len(rewards) >= 2:
        tenth = max(1, len(rewards) // 10)
        first, last = mean(rewards[:tenth]), mean(rewards[-tenth:])
        begin = f"{first:.3g} (first tenth of the steps)"
        parts.append(f"The reward during training went from {begin} to {last:.3g} (last tenth).")
    seconds = total_seconds(run)
    tokens = finite(run.summary.get("tokens_generated"))
    wrote = f" The model wrote {number(tokens)} tokens." if tokens else ""
    done = "It is complete" if run.summary.get("status") == "completed" else "It is not complete"
    if stopped_by := run.summary.get("stopped_by"):
        done = f"The alarm {stopped_by} stopped it"
    parts.append(f"{done}{f' and took {duration(seconds)}' if seconds else ''}.{wrote}")
    alarms = list(dict.fromkeys(alarm["name"] for alarm in raised(run.alarms)))
    if alarms:
        parts.append(f"Alarms rose: {', '.join(alarms)}.")
    elif run.metrics:
        parts.append("No alarm rose.")
    return [sentence for sentence in parts if sentence]


def accuracies(run: RunData) -> tuple[float | None, float | None]:
    """Held-out accuracy before and after training; None where it is not known."""
    held_out = curve(run.metrics, "eval/heldout/accuracy")
    before = finite(run.summary.get("held_out_accuracy_before"))
    after = finite(run.summary.get("held_out_accuracy_after"))
    # A run without a summary yet has the evaluation before the first step as the line of step 0.
    if before is None and held_out and 0 in run.metrics:
        before = finite(run.metrics[0].get("eval/heldout/accuracy"))
    return before, after


def time_words(phases: dict[str, float], config: dict[str, Any], traced: bool = False) -> str:
    """The phase that takes most of a policy's step, and what would shorten it (`ADVICE`).

    If steps were `traced`, the waterfall's more precise advice is left to it.
    """
    total = sum(phases.values())
    if not total:
        return "No step has recorded its time."
    first = max(phases, key=lambda name: phases[name])
    share = phases[first] / total
    words = f"{percent(share)} of the time of the steps goes into the phase “{first}”."
    advised = setting(config, "run.trains") in ("policy", None) and not traced
    return f"{words} {ADVICE[first]}" if share > 0.4 and first in ADVICE and advised else words


def phase_seconds(metrics: Metrics) -> dict[str, float]:
    """Seconds of all steps by phase of a step, in the order in which they were first recorded."""
    found: dict[str, float] = {}
    for values in metrics.values():
        for name, value in values.items():
            phase = name.removeprefix("time/")
            if phase != name and phase not in NO_PHASES:
                found[phase] = found.get(phase, 0.0) + value
    return found


def total_seconds(run: RunData) -> float:
    """Wall-clock seconds of the run: from the summary, otherwise the sum of its steps."""
    recorded = run.summary.get("seconds")
    known = [finite(value) or 0.0 for value in recorded.values()] if isinstance(recorded, dict) else []
    return sum(known) or sum(phase_seconds(run.metrics).values())


def last_step(metrics: Metrics) -> int:
    """The last step with a line; 0 without lines."""
    return max(metrics, default=0)


def curve(metrics: Metrics, name: str) -> list[float]:
    """The values of a metric in the order of steps."""
    return [values[name] for values in metrics.values() if name in values]


def percent(share: float) -> str:
    """A share as text in percent: 96.5% for 0.965."""
    return f"{100 * share:.3g}%" if abs(share) > 1e6 else f"{100 * share:.1f}".removesuffix(".0") + "%"


def number(value: float) -> str:
    """A number as text: 1,234,567 for 1234567, and 1e+300 for a huge one."""
    return f"{value:.3g}" if abs(value) > 2**53 else f"{value:,.0f}"


def duration(seconds: float) -> str:
    """Seconds as text, in the two largest units that fit."""
    if seconds < 60 or seconds > 1e11:
        return f"{number(seconds)} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def setting(config: dict[str, Any], name: str) -> Any:
    """A setting by its dotted name; None if the configuration lacks it."""
    value: Any = config
    for word in name.split("."):
        value = value.get(word) if isinstance(value, dict) else None
    return value


def _what(run: RunData) -> str:
    parameters = finite(run.summary.get("parameters"))
    size = f" of {number(parameters)} parameters" if parameters else ""
    task = setting(run.config, "data.task")
    if task == "jsonl":
        path = setting(run.config, "data.train_path")
        sources = setting(run.config, "data.sources")
        names = ", ".join(map(str, sources)) if isinstance(sources, dict) else ""
        task = Path(path).name if isinstance(path, str) else names
    on = f" on problems of {task}" if isinstance(task, str) and task else ""
    kind = {"policy": "A language model", "reward_model": "A reward model"}.get(
        str(setting(run.config, "run.trains")), "A model"
    )
    ranks = finite(run.summary.get("world_size"))
    where = f", on {number(ranks)} process{'es' if ranks != 1 else ''}" if ranks else ""
    prompts, group = setting(run.config, "algorithm.prompts_per_step"), setting(run.config, "algorithm.group_size")
    how = ""
    if isinstance(prompts, int) and isinstance(group, int) and kind == "A language model":
        moved = "made the better ones more likely"
        if setting(run.config, "distill.teacher") is not None:
            better = f"{moved}, and " if setting(run.config, "distill.reward_coef") else ""
            moved = f"{better}moved towards what its teacher finds likely"
        how = f" Each step sampled {group} completions of each of {prompts} problems and {moved}."
    return f"{kind}{size} was trained{on}{where}.{how}"


def _format_and_length(run: RunData) -> str:
    parts = []
    before, after = (finite(run.summary.get(f"format_rate_{when}")) for when in ("before", "after"))
    if before is not None and after is not None:
        parts.append(f"the share of well-formed completions went from {percent(before)} to {percent(after)}")
    before, after = (finite(run.summary.get(f"mean_length_{when}")) for when in ("before", "after"))
    if before is not None and after is not None:
        moved = "rose" if after > before else "fell" if after < before else "stayed"
        to = f"at {after:.3g}" if moved == "stayed" else f"from {before:.3g} to {after:.3g}"
        parts.append(f"the mean length of a completion {moved} {to} tokens")
    return f"On the same problems {' and '.join(parts)}." if parts else ""


def raised(alarms: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records of alarms that rose, without those of alarms that are over."""
    return [alarm for alarm in alarms if not alarm.get("cleared")]
