"""Rules about adapters: which matrices can have them, and which settings must not change the loaded weights."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from grpo_mega.config.schema import Config, LoRAConfig

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
