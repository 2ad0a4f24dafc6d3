"""Rules about base model, cold start, distillation and adapters; `config/teacher.py` checks a teacher's files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from difflib import get_close_matches
from operator import attrgetter

from grpo_mega.config.rules.optimizer import schedule_problems
from grpo_mega.config.rules.problems import at_most
from grpo_mega.config.schema import GENERATED_TASKS, Config, DistillConfig, LoRAConfig


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


def distill_problems(config: Config) -> Iterator[str]:
    """A message for each setting that is incompatible with a teacher, or has no effect without one."""
    distill, algorithm = config.distill, config.algorithm
    if not distill.teacher:
        for field in fields(DistillConfig):
            if (value := getattr(distill, field.name)) != field.default:
                yield (
                    f"distill.{field.name}={value} has no effect without a teacher; set distill.teacher, or leave "
                    f"distill.{field.name} out"
                )
        return
    if distill.served and config.rollout.temperature != 1:
        yield (
            f"rollout.temperature={config.rollout.temperature:g} does not go with distill.teacher={distill.teacher}: "
            "SGLang scores a text at temperature 1; set rollout.temperature=1, or name the teacher's files"
        )
    if not distill.served and distill.timeout_seconds != DistillConfig.timeout_seconds:
        yield (
            f"distill.timeout_seconds={distill.timeout_seconds:g} is for a teacher that is a server, http://HOST:PORT; "
            "leave it out"
        )
    own = "gives every token an advantage of its own"
    refused = {
        "algorithm.advantage_baseline": (
            algorithm.advantage_baseline == "critic",
            "mean",
            "takes the place of a critic's advantages",
        ),
        "algorithm.objective": (algorithm.objective in ("gspo", "gmpo", "vespo"), "ppo or gspo_token", own),
        "algorithm.groups_without_signal": (
            algorithm.groups_without_signal != "count",
            "count",
            "has something to say of every group",
        ),
    }
    if not distill.reward_coef:
        only = "with distill.reward_coef=0 leaves rewards without effect"
        refused |= {
            "algorithm.kl_in": (algorithm.kl_in == "reward", "loss", only),
            "algorithm.supervision": (algorithm.supervision == "process", "outcome", only),
        }
    for name, (is_set, instead, why) in refused.items():
        if is_set:
            yield (
                f"{name}={attrgetter(name)(config)} does not go with distill.teacher={distill.teacher}, which {why}; "
                f"set {name}={instead}, or distill.teacher=null"
            )


TARGETS = ("attention", "mlp", "experts")


def lora_problems(config: Config) -> Iterator[str]:
    """A message for each rule that the settings of the adapters violate."""
    lora, model = config.lora, config.model
    for target in lora.targets:
        if target not in TARGETS:
            close = get_close_matches(target, TARGETS, n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            yield f"lora.targets has {target}: choose from {', '.join(TARGETS)}{meant}"
    if not lora.rank:
        if lora != LoRAConfig():
            yield "lora.alpha and lora.targets have no effect with lora.rank=0; set lora.rank, or leave them out"
        return
    if not _beside_experts(config):
        yield (
            f"lora.targets={lora.targets} names no matrix of this model that every token meets, and Megatron's "
            "optimizer needs one; add attention"
        )
    elif config.layout.pp > 1 and not _in_every_layer(config):
        yield (
            f"lora.targets={lora.targets} leaves layers without adapters, and with layout.pp={config.layout.pp} a "
            "pipeline stage could have none to train; add attention to lora.targets, or set layout.pp=1"
        )
    if config.base.train:
        yield (
            f"lora.rank={lora.rank} trains adapters of a model that exists, and base.train=true makes one: run it "
            "without lora.rank first, then set base=none and run.init_from=CHECKPOINT"
        )
    if model.moe.experts and model.moe.bias_update_rate > 0:
        yield (
            f"lora.rank={lora.rank} leaves the routers as they were loaded, and model.moe.bias_update_rate="
            f"{model.moe.bias_update_rate} changes their bias; set model.moe.bias_update_rate=0 and "
            "model.moe.frozen_bias=true"
        )


def _in_every_layer(config: Config) -> bool:
    """Whether each layer has a matrix named by the targets."""
    moe, targets = config.model.moe, config.lora.targets
    dense = moe.first_dense if moe.experts else config.model.layers
    routed = "experts" in targets or ("mlp" in targets and moe.shared_ffn_hidden > 0)
    return "attention" in targets or (("mlp" in targets or not dense) and (routed or not moe.experts))


def _beside_experts(config: Config) -> bool:
    """Whether the targets name a matrix of the model outside the routed experts."""
    model, targets = config.model, config.lora.targets
    dense = not model.moe.experts or model.moe.first_dense > 0 or model.moe.shared_ffn_hidden > 0
    return "attention" in targets or ("mlp" in targets and dense)
