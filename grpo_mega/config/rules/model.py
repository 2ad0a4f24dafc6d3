"""Rules about the model: its sizes, attention and experts."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_mega.config.rules.problems import at_most, divisible, multiples
from grpo_mega.config.schema import Config, ModelConfig
from grpo_mega.models.families import FAMILIES, WITH_OWN_LAYERS, layers_of


def model_problems(config: Config) -> Iterator[str]:
    """A message for each rule that the settings of the model violate."""
    model = config.model
    yield from divisible(config, "model.heads", "model.kv_heads")
    if model.head_dim is None:
        yield from divisible(config, "model.hidden", "model.heads")
    yield from at_most(config, "model.context", "layout.micro_batch_tokens")
    yield from at_most(config, "model.yarn.beta_slow", "model.yarn.beta_fast")
    if model.mtp_layers and model.tie_embeddings:
        yield (
            f"model.mtp_layers={model.mtp_layers} reads the embedding without gradient, and with "
            "model.tie_embeddings=true Megatron would give it the output layer's; set one of them off"
        )
    stretching = " or ".join(f"model.family={name}" for name in WITH_OWN_LAYERS if layers_of(name).yarn)
    if model.yarn.factor > 1 and model.attention != "mla" and not layers_of(model.family).yarn:
        yield (
            f"model.yarn.factor={model.yarn.factor} is for latent attention and {stretching}; set "
            "model.attention=mla, or model.yarn.factor=1"
        )
    if not model.yarn.truncate and not layers_of(model.family).yarn:
        yield f"model.yarn.truncate=false is for {stretching}; set model.yarn.truncate=true"
    yield from _stretched(model)
    yield from _channels(model)
    yield from _turning(model)
    yield from _windows(model)
    if model.family:
        yield from FAMILIES[model.family].problems(config)
    if model.moe.experts > 0:
        yield from _experts(config)


def _stretched(model: ModelConfig) -> Iterator[str]:
    """Rules about rotary positions of grouped-query attention, and about biases."""
    rope = model.llama3_rope
    if model.attention == "mla" and rope.factor > 1:
        yield (
            f"model.llama3_rope.factor={rope.factor} is for grouped-query attention; set model.attention=gqa, or "
            "model.llama3_rope.factor=1"
        )
    if rope.high_freq_factor <= rope.low_freq_factor:
        yield (
            f"model.llama3_rope.high_freq_factor={rope.high_freq_factor} must be above "
            f"model.llama3_rope.low_freq_factor={rope.low_freq_factor}; raise it"
        )
    if model.attention == "mla" and model.rope_fraction != 1:
        yield (
            f"model.rope_fraction={model.rope_fraction} is for grouped-query attention; set model.attention=gqa, or "
            "model.rope_fraction=1"
        )
    if model.attention == "mla" and model.qkv_bias:
        yield "model.qkv_bias=true has no effect with model.attention=mla; set model.qkv_bias=false"


def _channels(model: ModelConfig) -> Iterator[str]:
    """Rules about the channels of attention heads; rotary positions need an even number."""
    rope_dim = model.mla.qk_rope_dim
    if model.attention == "mla":
        if model.kv_heads != model.heads:
            yield (
                f"model.kv_heads={model.kv_heads} has no effect with model.attention=mla, where every head has keys of "
                f"its own; set model.kv_heads={model.heads}"
            )
        if model.head_dim is not None:
            yield (
                f"model.head_dim={model.head_dim} has no effect with model.attention=mla; leave it null and set the "
                "sizes in model.mla"
            )
        if rope_dim % 2:
            yield f"model.mla.qk_rope_dim={rope_dim}: rotary positions turn channels in pairs; choose {rope_dim + 1}"
    elif model.head_dim is not None:
        if model.head_dim % 2:
            yield (
                f"model.head_dim={model.head_dim}: rotary positions turn channels in pairs; choose {model.head_dim + 1}"
            )
    elif model.heads > 0 and model.hidden % (2 * model.heads) == model.heads:
        yield (
            f"model.hidden={model.hidden} gives model.heads={model.heads} heads an odd number of channels, and rotary "
            f"positions turn channels in pairs; choose {multiples(model.hidden, 2 * model.heads)}"
        )


def _windows(model: ModelConfig) -> Iterator[str]:
    """Rules about sliding windows."""
    if model.window is None:
        for name in ("full_every", "window_rope_base"):
            if getattr(model, name):
                yield f"model.{name}={getattr(model, name)} has no effect without a window; set model.window"
    elif model.window_rope_base and model.llama3_rope.factor > 1:
        yield (
            f"model.llama3_rope.factor={model.llama3_rope.factor} would stretch positions within windows, which have "
            f"model.window_rope_base={model.window_rope_base}; set model.llama3_rope.factor=1"
        )
    elif model.attention == "mla" or model.mtp_layers:
        yield (
            f"model.window={model.window} is for grouped-query attention without prediction modules; set "
            "model.attention=gqa and model.mtp_layers=0, or model.window=null"
        )
    if model.query_pre_attn_scalar and model.attention == "mla":
        yield (
            f"model.query_pre_attn_scalar={model.query_pre_attn_scalar} is for grouped-query attention; set "
            "model.attention=gqa, or model.query_pre_attn_scalar=null"
        )


def _turning(model: ModelConfig) -> Iterator[str]:
    """A message when `rope_fraction` of a head is not a whole number of channel pairs."""
    channels = model.head_dim or model.hidden // max(model.heads, 1)
    if model.rope_fraction != 1 and model.rope_fraction * channels % 2:
        nearest = max(2, 2 * round(model.rope_fraction * channels / 2))
        yield (
            f"model.rope_fraction={model.rope_fraction} of {channels} channels is no even number, and rotary positions "
            f"turn channels in pairs; choose {nearest / channels} for {nearest} of them"
        )


def _experts(config: Config) -> Iterator[str]:
    moe = config.model.moe
    yield from at_most(config, "model.moe.top_k", "model.moe.experts")
    yield from at_most(config, "model.moe.first_dense", "model.layers", margin=1)
    if moe.groups:
        yield from divisible(config, "model.moe.experts", "model.moe.groups")
        yield from divisible(config, "model.moe.top_k", "model.moe.group_top_k")
        yield from at_most(config, "model.moe.group_top_k", "model.moe.groups")
    if moe.bias_update_rate > 0 and moe.score != "sigmoid":
        yield (
            f"model.moe.bias_update_rate={moe.bias_update_rate} needs sigmoid scores; "
            "set model.moe.score=sigmoid or model.moe.bias_update_rate=0"
        )
    if moe.frozen_bias and (moe.bias_update_rate > 0 or moe.score != "sigmoid"):
        yield (
            f"model.moe.frozen_bias=true needs model.moe.score=sigmoid and model.moe.bias_update_rate=0, not "
            f"{moe.score} and {moe.bias_update_rate}; set these, or model.moe.frozen_bias=false"
        )
    if moe.top_k == 1 and moe.score == "softmax":
        yield (
            "model.moe.top_k=1 gives the router no gradient with model.moe.score=softmax, which is taken over the "
            "chosen experts; set model.moe.top_k=2 or model.moe.score=sigmoid"
        )
    if (moe.groups > 0) != (moe.group_top_k > 0):
        yield (
            f"model.moe.groups={moe.groups} and model.moe.group_top_k={moe.group_top_k} go together; "
            "set both above 0 for group-limited routing, or both to 0"
        )
    elif moe.groups > 0 and moe.top_k * moe.groups > moe.group_top_k * moe.experts:
        reach = moe.group_top_k * moe.experts // moe.groups
        yield (
            f"model.moe.top_k={moe.top_k} exceeds the {reach} experts in model.moe.group_top_k={moe.group_top_k} "
            f"groups; lower model.moe.top_k to {reach} or raise model.moe.group_top_k"
        )
