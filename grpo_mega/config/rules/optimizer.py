"""Rules about learning rates, and about the trained parts of the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from grpo_mega.config.rules.shared import unknown
from grpo_mega.config.schema import (
    Config,
    LoRAConfig,
    ModelConfig,
    OptimizerConfig,
    PairsConfig,
    PartConfig,
    PartsConfig,
    SFTConfig,
)
from grpo_mega.errors import InputError

PARTS = tuple(field.name for field in fields(PartsConfig))
SLOWEST = 1 - 2**-8
"""beta1 and beta2 are below this for moments in bf16. An update without gradient multiplies a moment by beta, and in
numbers of 8 binary digits a relative change of less than 2^-8 may be rounded away."""


def optimizer_problems(config: Config) -> Iterator[InputError]:
    """An error for each rule that the settings of the optimizer violate."""
    updates = config.algorithm.epochs * config.algorithm.mini_batches
    # A stage of 0 steps makes no updates, so its schedule is not checked.
    if config.run.steps:
        yield from schedule_problems(config.optimizer, "optimizer", config.run.steps, "run.steps", max(1, updates))
    yield from part_problems(config.optimizer, config.model, config.lora)
    yield from state_problems(config.optimizer)
    yield from _frozen_problems(config)


def state_problems(optimizer: OptimizerConfig) -> Iterator[InputError]:
    """An error for each violated rule about how Adam's state is kept."""
    state = optimizer.state
    narrow = state.moments == "bf16"
    for is_set, lean, usual in (
        (narrow, "optimizer.state.moments=bf16", "optimizer.state.moments=fp32"),
        (state.on_host, "optimizer.state.on_host=true", "optimizer.state.on_host=false"),
    ):
        if is_set and not optimizer.distributed:
            yield InputError(
                lean, "needs Megatron's distributed optimizer", f"set optimizer.distributed=true, or {usual}"
            )
    for name, beta in (("beta1", optimizer.beta1), ("beta2", optimizer.beta2)):
        if narrow and beta >= SLOWEST:
            yield InputError(
                f"optimizer.{name}={beta}",
                "too slow for optimizer.state.moments=bf16: the decay of a moment would be rounded away, so that it "
                "never falls",
                "set it to 0.99 or less, or optimizer.state.moments=fp32",
            )


def part_problems(optimizer: OptimizerConfig, model: ModelConfig, lora: LoRAConfig) -> Iterator[InputError]:
    """An error for each part that has settings without effect."""
    for part in PARTS:
        field = f"optimizer.parts.{part}"
        if getattr(optimizer.parts, part) == PartConfig():
            continue
        if missing := _why_missing(part, model, lora):
            yield InputError(field, f"no effect: {missing}", "leave its settings out")
        if part in optimizer.frozen:
            yield InputError(field, "no effect with optimizer.frozen, which names it", "remove it from one of them")
    if (decay := optimizer.parts.norms.weight_decay) is not None:
        yield InputError(
            f"optimizer.parts.norms.weight_decay={decay}", "no effect: norms never decay", "set it to null"
        )


def _frozen_problems(config: Config) -> Iterator[InputError]:
    """An error for each violated rule about frozen parts."""
    frozen, model, lora = config.optimizer.frozen, config.model, config.lora
    where = f"optimizer.frozen={frozen}"
    for part in frozen:
        if part not in PARTS:
            yield unknown(where, part, PARTS)
        elif missing := _why_missing(part, model, lora):
            yield InputError(where, f"{part}: {missing}", f"take {part} out")
    if all(part in frozen or _why_missing(part, model, lora) for part in PARTS):
        yield InputError(where, "leaves no part of the model to train", "take one out")
    if frozen and config.base.train:
        yield InputError(
            where,
            "keeps weights as they were loaded, and base.train=true makes new ones",
            "set base=none and run.init_from, or optimizer.frozen=[]",
        )
    if "router" in frozen and model.moe.bias_update_rate > 0:
        yield InputError(
            where,
            f"model.moe.bias_update_rate={model.moe.bias_update_rate} changes what a frozen router chooses",
            "set model.moe.bias_update_rate=0 and model.moe.frozen_bias=true",
        )


def _why_missing(part: str, model: ModelConfig, lora: LoRAConfig) -> str | None:
    """Why the model has no such part, or does not train it; None when it does."""
    moe, adapted = model.moe, lora.rank > 0
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
    config: OptimizerConfig | SFTConfig | PairsConfig, section: str, steps: int, length: str, updates: int = 1
) -> Iterator[InputError]:
    """Rules about a schedule, in a stage of `steps` steps, each of at most `updates` updates.

    `section` is that of the fields, "optimizer", "sft" or "pairs"; `length` names the setting of the stage's length. A
    warm-up longer than the run is refused only with a decay: a constant rate may be continued with more steps.
    """
    schedule = f"{section}.schedule={config.schedule}"
    # The warm-up is given in updates and the decay in steps; a step that the warm-up only partly fills counts as one.
    decay, warm = config.decay_steps, -(-config.warmup_steps // updates)
    left = steps - warm
    if config.schedule == "constant":
        return
    if config.schedule == "wsd" and decay is None:
        yield InputError(
            f"{section}.decay_steps",
            f"not set, and {schedule} needs it",
            f"give {section}.decay_steps={max(2, steps // 10)}",
        )
    # The first step of the decay is still at the peak, so a fall takes two.
    elif left < 2:
        fix = f"lower it to {(steps - 2) * updates}, or raise {length}" if steps > 2 else f"raise {length}"
        what = f"leaves {max(0, left)} of {steps} steps, and {schedule} needs at least two to decay"
        yield InputError(f"{section}.warmup_steps={config.warmup_steps}", what, fix)
    elif decay is not None and decay > left:
        what = f"more than the {left} steps after warm-up"
        yield InputError(f"{section}.decay_steps={decay}", what, f"lower it to {left}, or raise {length}")
    # Under wsd the decay always lies at the end of the stage; linear and cosine decay right after the warm-up.
    elif config.schedule != "wsd" and decay is not None and decay < left and config.lr_floor == 0:
        yield InputError(
            f"{section}.lr_floor=0",
            f"the last {left - decay} of {steps} steps would have no learning rate",
            f"set it above 0, or {section}.decay_steps={left}",
        )
