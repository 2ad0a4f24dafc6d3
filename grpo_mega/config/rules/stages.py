"""The base model and the cold start."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_mega.config.rules.problems import at_most
from grpo_mega.config.schema import Config


def stages_problems(config: Config) -> Iterator[str]:
    """What the stages before reinforcement learning break."""
    base, sft, task = config.base, config.sft, config.data.task
    if base.train and task != "chain_sum":
        yield f"base.train=true needs worked arithmetic, not data.task={task}; choose data=chain_sum or base=none"
    if sft.steps > 0 and task != "chain_sum":
        yield f"sft.steps={sft.steps} needs worked arithmetic, not data.task={task}; choose data=chain_sum or sft=none"
    if sft.steps:
        yield from at_most(config, "sft.warmup_steps", "sft.steps", margin=1)
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
