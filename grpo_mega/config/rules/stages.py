"""Rules about the base model and the cold start."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_mega.config.rules.optimizer import schedule_problems
from grpo_mega.config.rules.problems import at_most
from grpo_mega.config.schema import GENERATED_TASKS, Config


def stages_problems(config: Config) -> Iterator[str]:
    """A message for each violated rule about the stages before reinforcement learning."""
    base, task = config.base, config.data.task
    if base.train and task not in GENERATED_TASKS:
        yield f"base.train=true needs worked problems, not data.task={task}; choose data=chain_sum or base=none"
    if config.run.steps == 0 and not (base.train or config.sft.steps or config.sft.epochs):
        yield "run.steps=0 leaves nothing to do without supervised steps; set run.steps, or sft.path and sft.epochs"
    yield from _sft_problems(config)
    earliest = base.gate_from + (base.gate_passes - 1) * base.gate_every
    if base.train and earliest > base.max_steps:
        yield (
            f"base.gate_from={base.gate_from}, base.gate_every={base.gate_every} and base.gate_passes="
            f"{base.gate_passes} let the gate be passed at step {earliest} at the earliest; raise base.max_steps="
            f"{base.max_steps}"
        )
    if base.train and config.run.init_from is not None:
        yield (
            f"run.init_from={config.run.init_from} contradicts base.train=true; set run.init_from=null, or "
            "choose base=none"
        )


def _sft_problems(config: Config) -> Iterator[str]:
    """A message for each violated rule about supervised steps."""
    sft, task = config.sft, config.data.task
    if sft.steps > 0 and not sft.path and task != "chain_sum":
        yield (
            f"sft.steps={sft.steps} needs rows to learn, and data.task={task} makes none; give sft.path=FILE.jsonl, or "
            "choose data=chain_sum or sft=none"
        )
    if sft.path and not sft.steps and not sft.epochs:
        yield f"sft.path={sft.path} has no effect without steps; set sft.epochs=1, or sft.path=null"
    if sft.steps and sft.epochs:
        yield f"sft.steps={sft.steps} and sft.epochs={sft.epochs} both say how long; set one of them to 0"
    elif sft.steps:
        yield from at_most(config, "sft.warmup_steps", "sft.steps", margin=1)
        if sft.warmup_steps < sft.steps:
            yield from schedule_problems(sft, "sft", sft.steps, "sft.steps")
    idle = {"epochs": (sft.epochs, 0), "max_tokens": (sft.max_tokens, None), "too_long": (sft.too_long, "refuse")}
    for name, (value, default) in idle.items():
        if not sft.path and value != default:
            yield (
                f"sft.{name}={value} is about the rows of sft.path; give sft.path=FILE.jsonl, or set "
                f"sft.{name}={'null' if default is None else default}"
            )
    if sft.max_tokens:
        yield from at_most(config, "sft.max_tokens", "model.context")
