"""Rules about learning rates, and about the trained parts of the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from difflib import get_close_matches

from grpo_mega.config.schema import Config, OptimizerConfig, PairsConfig, PartConfig, PartsConfig, SFTConfig

PARTS = tuple(field.name for field in fields(PartsConfig))
SLOWEST = 1 - 2**-8
"""beta1 and beta2 are below this for moments in bf16. An update without gradient multiplies a moment by beta, and in
numbers of 8 binary digits a relative change of less than 2^-8 may be rounded away."""


def optimizer_problems(config: Config) -> Iterator[str]:
    """A message for each rule that the settings of the optimizer violate."""
    updates = config.algorithm.epochs * config.algorithm.mini_batches
    if config.run.steps:  # otherwise there are no updates
        yield from schedule_problems(config.optimizer, "optimizer", config.run.steps, "run.steps", max(1, updates))
    yield from part_problems(config)
    yield from state_problems(config.optimizer)
    yield from _frozen_problems(config)


def state_problems(optimizer: OptimizerConfig) -> Iterator[str]:
    """A message for each violated rule about how Adam's state is kept."""
    state = optimizer.state
    narrow = state.moments == "bf16"
    for asked, lean, usual in (
        (narrow, "optimizer.state.moments=bf16", "optimizer.state.moments=fp32"),
        (state.on_host, "optimizer.state.on_host=true", "optimizer.state.on_host=false"),
    ):
        if asked and not optimizer.distributed:
            yield (
                f"{lean} needs Megatron's distributed optimizer, whose inner one keeps its own state; set "
                f"optimizer.distributed=true, or {usual}"
            )
    for name, beta in (("beta1", optimizer.beta1), ("beta2", optimizer.beta2)):
        if narrow and beta >= SLOWEST:
            yield (
                f"optimizer.{name}={beta} is too slow for optimizer.state.moments=bf16: what an update takes of a "
                "moment would be rounded away, so that it never falls; set it to 0.99 or less, or "
                "optimizer.state.moments=fp32"
            )


def part_problems(config: Config) -> Iterator[str]:
    """A message for each part that has settings without effect."""
    optimizer = config.optimizer
    for part in PARTS:
        own, here = getattr(optimizer.parts, part), f"optimizer.parts.{part}"
        if own == PartConfig():
            continue
        if missing := _why_missing(config, part):
            yield f"{here} has settings, and {missing}; take them out"
        if part in optimizer.frozen:
            yield f"{here} has settings, and optimizer.frozen has {part}; take it out of one of the two"
    if optimizer.parts.norms.weight_decay is not None:
        yield (
            f"optimizer.parts.norms.weight_decay={optimizer.parts.norms.weight_decay} has no effect: norms never "
            "decay; set it to null"
        )


def _frozen_problems(config: Config) -> Iterator[str]:
    """A message for each violated rule about frozen parts."""
    frozen, moe = config.optimizer.frozen, config.model.moe
    for part in frozen:
        if part not in PARTS:
            close = get_close_matches(part, PARTS, n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            yield f"optimizer.frozen has {part}: choose from {', '.join(PARTS)}{meant}"
        elif missing := _why_missing(config, part):
            yield f"optimizer.frozen has {part}, and {missing}; take it out"
    if all(part in frozen or _why_missing(config, part) for part in PARTS):
        yield "optimizer.frozen has every part of the model, so nothing is trained; take one out"
    if frozen and config.base.train:
        yield (
            f"optimizer.frozen={frozen} keeps weights as they were loaded, and base.train=true makes them; set "
            "base=none and run.init_from, or optimizer.frozen=[]"
        )
    if "router" in frozen and moe.bias_update_rate > 0:
        yield (
            f"optimizer.frozen has router, and model.moe.bias_update_rate={moe.bias_update_rate} changes the choice of "
            "experts; set model.moe.bias_update_rate=0 and model.moe.frozen_bias=true"
        )


def _why_missing(config: Config, part: str) -> str | None:
    """Why the model has no such part, or does not train it; None when it does."""
    model, moe, adapted = config.model, config.model.moe, config.lora.rank > 0
    if adapted != (part == "adapters"):
        return "with lora.rank=0 there are none" if part == "adapters" else "with lora.rank above 0 it is not trained"
    if part == "head" and model.tie_embeddings:
        return "with model.tie_embeddings=true it is the embedding"
    if part in ("experts", "router") and not moe.experts:
        return "with model.moe.experts=0 there is none"
    if part == "mlp" and moe.experts and not moe.first_dense and not moe.shared_ffn_hidden:
        return "with model.moe.first_dense=0 and model.moe.shared_ffn_hidden=0 there is none"
    if part == "predictors" and not model.mtp_layers:
        return "with model.mtp_layers=0 there is none"
    return None


def schedule_problems(
    config: OptimizerConfig | SFTConfig | PairsConfig, room: str, steps: int, length: str, updates: int = 1
) -> Iterator[str]:
    """Rules about a schedule, in a stage of `steps` steps, each of at most `updates` updates.

    `room` is the room of the fields, "optimizer", "sft" or "pairs"; `length` names the setting of the stage's length. A
    warm-up longer than the run is refused only with a decay: a constant rate may be continued with more steps.
    """
    schedule = f"{room}.schedule={config.schedule}"
    decay, warm = config.decay_steps, -(-config.warmup_steps // updates)
    if config.schedule == "constant":
        idle = {"decay_steps": (decay, None), "lr_floor": (config.lr_floor, 0.0)}
        for name, (value, default) in idle.items():
            if value != default:
                unset = "null" if default is None else "0"
                yield f"{room}.{name}={value} has no effect with {schedule}; set it to {unset}, or choose wsd or cosine"
    elif config.schedule == "wsd" and decay is None:
        yield (
            f"{room}.decay_steps is not set, and {schedule} has to know when to fall; give {room}.decay_steps="
            f"{max(2, steps // 10)}"
        )
    elif steps - warm < 2:  # the first step of the decay is still at the peak
        fix = f"lower it to {(steps - 2) * updates}, or raise {length}" if steps > 2 else f"raise {length}"
        yield (
            f"{room}.warmup_steps={config.warmup_steps} leaves {max(0, steps - warm)} of {steps} steps, and {schedule} "
            f"takes two or more to fall; {fix}"
        )
    elif decay is not None and warm + decay > steps:
        yield (
            f"{room}.decay_steps={decay} is more than the {steps - warm} steps after warm-up; lower it to "
            f"{steps - warm}, or raise {length}"
        )
    elif config.schedule != "wsd" and decay is not None and warm + decay < steps and config.lr_floor == 0:
        yield (
            f"{room}.lr_floor=0 leaves the last {steps - warm - decay} of {steps} steps without a learning rate; set "
            f"it above 0, or {room}.decay_steps={steps - warm}"
        )
