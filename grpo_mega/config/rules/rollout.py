"""Rules about sampling and the engines: server arguments, parallelism, precision, GPUs and time limits."""

from __future__ import annotations

import math
from collections.abc import Iterator

from grpo_mega.config.rules.shared import at_most, divisors
from grpo_mega.config.schema import (
    BaseConfig,
    Config,
    EnvironmentConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    SGLangConfig,
)
from grpo_mega.errors import InputError
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


def rollout_problems(config: Config) -> Iterator[InputError]:
    """An error for each rule that the settings of the rollouts violate."""
    rollout = config.rollout
    yield from at_most(config, "rollout.max_new_tokens", "model.context", margin=1)
    if rollout.longer_max_new_tokens:
        yield from at_most(config, "rollout.longer_max_new_tokens", "model.context", margin=1)
        yield from at_most(config, "rollout.max_new_tokens", "rollout.longer_max_new_tokens", margin=1)
    if (rollout.longer_from_step is None) != (rollout.longer_max_new_tokens is None):
        name, other = "longer_from_step", "longer_max_new_tokens"
        if rollout.longer_from_step is None:
            name, other = other, name
        what = f"no effect without rollout.{other}"
        yield InputError(f"rollout.{name}={getattr(rollout, name)}", what, "give both, or leave both null")
    if rollout.samples_wait:
        yield from _staleness_problems(config)
    yield from _environment_problems(config.environment, config.reward)
    if rollout.engine == "sglang":
        yield from _sglang_problems(rollout, config.model, config.base)
    else:
        yield from at_most(config, "algorithm.group_size", "rollout.concurrent_sequences")
        yield from at_most(config, "eval.samples", "rollout.concurrent_sequences")


def _environment_problems(environment: EnvironmentConfig, reward: RewardConfig) -> Iterator[InputError]:
    """An error for each violated rule about the environment."""
    if environment.reply.count("{reply}") != 1 and environment.reply not in ("tool", "user"):
        where = f"environment.reply={environment.reply!r}"
        yield InputError(where, "must have one place for the reply", "write {reply} once, or set it to tool or user")
    rewarded = any(term.built_in == "environment" for term in reward.terms)
    if rewarded and not environment.path:
        what = "no environment gives this reward"
        yield InputError("reward.terms: environment", what, "set environment.path, or remove the term")


def _staleness_problems(config: Config) -> Iterator[InputError]:
    """An error for each violated rule about samples that outlive a step."""
    rollout, algorithm = config.rollout, config.algorithm
    cause, without = "rollout.ahead=true", "rollout.ahead=false"
    if rollout.slice_tokens is not None:
        cause, without = f"rollout.slice_tokens={rollout.slice_tokens}", "rollout.slice_tokens=null"
        yield from at_most(config, "rollout.slice_tokens", "model.context")
        if rollout.in_flight is not None:
            yield from at_most(config, "algorithm.prompts_per_step", "rollout.in_flight")
        page = rollout.sglang.arguments.get("page_size", 1) if rollout.engine == "sglang" else 1
        if isinstance(page, int) and 0 < rollout.slice_tokens < page:
            yield InputError(
                cause,
                f"SGLang keeps whole pages, of rollout.sglang.arguments.page_size={page}, and would compute what a "
                "slice adds again in the next",
                f"raise it to {page}, or lower the page size",
            )
    if algorithm.correction == "none":
        yield InputError(
            "algorithm.correction=none",
            f"with {cause} a sample has tokens of earlier weights, for which the loss must be corrected",
            f"set algorithm.correction=truncate or mask, or {without}",
        )
    # Where no cluster is described, `check_platform` finds out when the engines start.
    if rollout.ahead and rollout.engine == "sglang" and rollout.sglang.first_gpu is None and config.cluster.gpu:
        yield InputError(
            "rollout.ahead=true",
            "the engines cannot generate while the trainer has their GPUs",
            "set rollout.sglang.first_gpu to give the engines other GPUs, or rollout.ahead=false",
        )


def _sglang_problems(rollout: RolloutConfig, model: ModelConfig, base: BaseConfig) -> Iterator[InputError]:
    """An error for each violated rule about SGLang's engines."""
    sglang, number, default = rollout.sglang, rollout.concurrent_sequences, RolloutConfig().concurrent_sequences
    # With SGLang, the embedded engine generates only for the gate of a base model.
    if number != default and not base.train:
        yield InputError(
            f"rollout.concurrent_sequences={number}",
            "no effect with rollout.engine=sglang and base.train=false",
            f"give rollout.concurrent_sequences={default}, or rollout.engine=embedded",
        )
    if not layers_of(model.family).sglang:
        yield InputError(
            f"model.family={model.family}",
            "not tested with rollout.engine=sglang, which may compute these layers differently",
            "set rollout.engine=embedded",
        )
    elif model.window and not layers_of(model.family).sglang_windows:
        yield InputError(
            f"model.window={model.window}",
            "SGLang gives such layers no windows (rollout.engine=sglang)",
            "set rollout.engine=embedded, or model.window=null if model.context is no longer than the window",
        )
    if sglang.routing_replay and not model.moe.experts:
        fix = "set model.moe.experts above 0, or rollout.sglang.routing_replay=false"
        yield InputError("rollout.sglang.routing_replay=true", "needs experts", fix)
    if sglang.fp8:
        yield from _fp8_problems(sglang, model)
    yield from _argument_problems(sglang, model.moe.experts)
    if sglang.first_gpu is not None:
        yield from _separate_gpus_problems(sglang)
    # With separate GPUs no memory changes hands, so the other time limits have no effect.
    limits = ["engine_loading"] if sglang.first_gpu is not None else [*vars(sglang.timeouts)]
    for name in limits:
        limit = getattr(sglang.timeouts, name)
        if name.startswith("engine_") and limit <= sglang.answer_seconds:
            yield InputError(
                f"rollout.sglang.timeouts.{name}={limit:g}",
                f"not above rollout.sglang.answer_seconds={sglang.answer_seconds:g}: the run would end before an "
                "engine that hangs is restarted",
                "raise the first or lower the second",
            )


def _separate_gpus_problems(sglang: SGLangConfig) -> Iterator[InputError]:
    """Rules about engines on GPUs that the trainer does not use."""
    where = f"rollout.sglang.first_gpu={sglang.first_gpu}"
    if sglang.transport == "shared":
        yield InputError(
            where,
            "rollout.sglang.transport=shared cannot reach engines on other GPUs than the trainer's",
            "set rollout.sglang.transport=network",
        )
    if not sglang.suspend_process_groups:
        yield InputError(
            "rollout.sglang.suspend_process_groups=false",
            f"no effect with {where}, where trainer and engines share no GPU",
            "set it to true",
        )


def _argument_problems(sglang: SGLangConfig, experts: int) -> Iterator[InputError]:
    """Rules about server arguments: those that follow from settings, and those that divide an engine."""
    given, section = sglang.arguments, "rollout.sglang.arguments"
    for name, setting in _FOLLOWING.items():
        if name in given:
            yield InputError(f"{section}.{name}", f"follows from {setting}", f"give ~{section}.{name}")
    if sglang.transport == "network" and "speculative_algorithm" in given:
        yield InputError(
            f"{section}.speculative_algorithm",
            "the draft model would wait for its own weights",
            "set rollout.sglang.transport=shared or disk",
        )
    for name, whole, of_what in (
        ("ep_size", math.gcd(sglang.tp, experts), f"rollout.sglang.tp={sglang.tp} and model.moe.experts={experts}"),
        ("dp_size", sglang.tp, f"rollout.sglang.tp={sglang.tp}"),
        ("attn_dp_size", sglang.tp, f"rollout.sglang.tp={sglang.tp}"),
    ):
        parts = given.get(name, 1)
        if type(parts) is not int or parts < 1 or whole % parts:
            yield InputError(f"{section}.{name}={parts}", f"must divide {of_what}", f"choose {divisors(whole)}")
            break
    # The sizes are compared with each other only if each of them is valid.
    else:
        if given.get("enable_dp_attention") and "attn_dp_size" in given:
            what = "means the same as enable_dp_attention with dp_size"
            yield InputError(f"{section}.attn_dp_size", what, "give one or the other")
        if given.get("dp_size", 1) > 1 and not given.get("enable_dp_attention"):
            yield InputError(
                f"{section}.dp_size",
                "makes copies of an engine, and each rank has a part of one",
                f"set it to 1, or set {section}.enable_dp_attention=true for copies of its attention",
            )
    exchange, shares_gpu = given.get("moe_a2a_backend", "none"), sglang.first_gpu is None
    if exchange != "none" and "mem_fraction_static" not in given and shares_gpu:
        yield InputError(
            f"{section}.moe_a2a_backend",
            "the engine takes more of a GPU that it shares than is planned for",
            f"give {section}.mem_fraction_static too",
        )


def _fp8_problems(sglang: SGLangConfig, model: ModelConfig) -> Iterator[InputError]:
    """An error for weights that are not bf16, or whose shards are not whole fp8 blocks, which SGLang requires."""
    where = "rollout.sglang.fp8=true"
    if model.dtype != "bf16":
        yield InputError(where, f"rounds weights that are trained in {model.dtype}", "set model.dtype=bf16")
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
            yield InputError(
                where,
                f"{name}={size} on {gpus} GPUs is not divisible into blocks of {FP8_BLOCK} columns",
                "lower rollout.sglang.tp, raise rollout.sglang.arguments.ep_size (experts) or set "
                "rollout.sglang.arguments.moe_dense_tp_size=1 (dense layers), or rollout.sglang.fp8=false",
            )
