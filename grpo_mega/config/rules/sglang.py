"""Rules about SGLang engines: server arguments, parallelism, precision, GPUs and time limits."""

from __future__ import annotations

import math
from collections.abc import Iterator

from grpo_mega.config.rules.problems import divisors
from grpo_mega.config.schema import Config, SGLangConfig
from grpo_mega.models.families import layers_of

FP8_BLOCK = 128
"""Block size of fp8 weights, as in weights/fp8.py, which cannot be imported here because it needs torch."""

_FOLLOWING = {
    "context_length": "model.context",
    "custom_weight_loader": "rollout.sglang.transport",
    "dtype": "model.dtype",
    "load_format": "rollout.sglang.transport",
    "model_path": "model",
    "nnodes": "rollout.sglang.tp",
    "node_rank": "rollout.sglang.tp",
    "pp_size": "rollout.sglang.tp",
    "skip_tokenizer_init": "data.tokenizer",
    "tp_size": "rollout.sglang.tp",
}
"""Server arguments that users cannot set -> setting that determines them."""


def sglang_problems(config: Config) -> Iterator[str]:
    """A message for each violated rule about SGLang's engines."""
    sglang, model = config.rollout.sglang, config.model
    if not layers_of(model.family).sglang:
        yield (
            f"model.family={model.family} with rollout.engine=sglang: nothing tests that SGLang computes these layers "
            "as here; set rollout.engine=embedded"
        )
    elif model.window and not layers_of(model.family).sglang_windows:
        yield (
            f"model.window={model.window} with rollout.engine=sglang: SGLang's Mistral and Ministral have no windows; "
            "set rollout.engine=embedded, or model.window=null if model.context is no longer than the window"
        )
    if sglang.routing_replay and not config.model.moe.experts:
        yield (
            "rollout.sglang.routing_replay=true needs experts; set model.moe.experts above 0, or "
            "rollout.sglang.routing_replay=false"
        )
    for name, setting in _FOLLOWING.items():
        if name in sglang.arguments:
            yield f"rollout.sglang.arguments.{name} follows from {setting}; give ~rollout.sglang.arguments.{name}"
    if sglang.transport == "network" and "speculative_algorithm" in sglang.arguments:
        yield (
            "rollout.sglang.arguments.speculative_algorithm: a draft model would wait for weights of its own; set "
            "rollout.sglang.transport=shared or disk"
        )
    if sglang.fp8 and config.model.dtype != "bf16":
        yield f"rollout.sglang.fp8=true rounds weights that are trained in {config.model.dtype}; set model.dtype=bf16"
    yield from _parts_of_an_engine(sglang, config.model.moe.experts)
    yield from _fp8_blocks(config)
    if (
        sglang.arguments.get("moe_a2a_backend", "none") != "none"
        and "mem_fraction_static" not in sglang.arguments
        and sglang.first_gpu is None
    ):
        yield (
            "rollout.sglang.arguments.moe_a2a_backend makes an engine take more of a GPU that it shares than is "
            "planned for; give rollout.sglang.arguments.mem_fraction_static, too"
        )
    yield from _gpus_of_their_own(sglang)
    for name, limit in vars(sglang.timeouts).items():
        if name in _used_timeouts(sglang) and name.startswith("engine_") and limit <= sglang.answer_seconds:
            yield (
                f"rollout.sglang.timeouts.{name}={limit:g} is not above rollout.sglang.answer_seconds="
                f"{sglang.answer_seconds:g}: the run would end before an engine that hangs is started anew; raise the "
                "first or lower the second"
            )


def _gpus_of_their_own(sglang: SGLangConfig) -> Iterator[str]:
    """Rules about engines on GPUs of their own."""
    if sglang.first_gpu is None:
        return
    if sglang.transport == "shared":
        yield (
            f"rollout.sglang.first_gpu={sglang.first_gpu} puts the engines on other GPUs than the trainer's, and "
            "rollout.sglang.transport=shared reaches those only; set rollout.sglang.transport=network"
        )
    why = f"has no effect with rollout.sglang.first_gpu={sglang.first_gpu}, where trainer and engines share no GPU"
    if not sglang.suspend_process_groups:
        yield f"rollout.sglang.suspend_process_groups=false {why}; set it to true"


def _used_timeouts(sglang: SGLangConfig) -> list[str]:
    """Names of the time limits that have an effect."""
    return ["engine_loading"] if sglang.first_gpu is not None else [*vars(sglang.timeouts)]


def _parts_of_an_engine(sglang: SGLangConfig, experts: int) -> Iterator[str]:
    """A message when expert parallelism or data parallel attention does not divide an engine."""
    given = sglang.arguments
    for name, whole, of_what in (
        ("ep_size", math.gcd(sglang.tp, experts), f"rollout.sglang.tp={sglang.tp} and model.moe.experts={experts}"),
        ("dp_size", sglang.tp, f"rollout.sglang.tp={sglang.tp}"),
        ("attn_dp_size", sglang.tp, f"rollout.sglang.tp={sglang.tp}"),
    ):
        parts = given.get(name, 1)
        if type(parts) is not int or parts < 1 or whole % parts:
            yield f"rollout.sglang.arguments.{name}={parts} must divide {of_what}; choose {divisors(whole)}"
            return
    if given.get("enable_dp_attention") and "attn_dp_size" in given:
        yield (
            "rollout.sglang.arguments.attn_dp_size means the same as enable_dp_attention with dp_size; give "
            "one or the other"
        )
    if given.get("dp_size", 1) > 1 and not given.get("enable_dp_attention"):
        yield (
            "rollout.sglang.arguments.dp_size makes copies of an engine, and each rank has a part of one; set it to 1, "
            "or set rollout.sglang.arguments.enable_dp_attention=true for copies of its attention"
        )


def _fp8_blocks(config: Config) -> Iterator[str]:
    """A message for each matrix whose shard is not a whole number of fp8 blocks, which SGLang requires."""
    sglang, model = config.rollout.sglang, config.model
    if not sglang.fp8 or model.dtype != "bf16":
        return
    sizes = {}
    if not model.moe.experts or model.moe.first_dense:
        sizes["model.ffn_hidden"] = (model.ffn_hidden, sglang.arguments.get("moe_dense_tp_size") or sglang.tp)
    if model.moe.experts:
        sizes["model.moe.ffn_hidden"] = (model.moe.ffn_hidden, sglang.tp // sglang.arguments.get("ep_size", 1))
    if model.moe.shared_ffn_hidden and sglang.arguments.get("moe_a2a_backend", "none") == "none":
        sizes["model.moe.shared_ffn_hidden"] = (model.moe.shared_ffn_hidden, sglang.tp)
    for name, (size, gpus) in sizes.items():
        if size % (FP8_BLOCK * gpus):
            yield (
                f"rollout.sglang.fp8=true needs blocks of {FP8_BLOCK} columns, and {name}={size} on {gpus} GPUs has "
                "none; lower rollout.sglang.tp, raise rollout.sglang.arguments.ep_size (experts) or set "
                "rollout.sglang.arguments.moe_dense_tp_size=1 (dense layers), or rollout.sglang.fp8=false"
            )
