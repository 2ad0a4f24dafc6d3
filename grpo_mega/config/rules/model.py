"""Rules about the model: its sizes, attention and experts."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_mega.config.rules.shared import at_most, divisible, multiples
from grpo_mega.config.schema import Config, ModelConfig
from grpo_mega.errors import InputError
from grpo_mega.models.families import FAMILIES, WITH_OWN_LAYERS, layers_of


def model_problems(config: Config) -> Iterator[InputError]:
    """An error for each rule that the settings of the model violate."""
    model = config.model
    yield from divisible(config, "model.heads", "model.kv_heads")
    if model.head_dim is None:
        yield from divisible(config, "model.hidden", "model.heads")
    yield from at_most(config, "model.context", "layout.micro_batch_tokens")
    yield from at_most(config, "model.yarn.beta_slow", "model.yarn.beta_fast")
    if model.mtp_layers and model.tie_embeddings:
        yield InputError(
            f"model.mtp_layers={model.mtp_layers}",
            "prediction modules read the embedding without gradient, and with model.tie_embeddings=true Megatron would "
            "add the output layer's",
            "set model.mtp_layers=0, or model.tie_embeddings=false",
        )
    yield from _stretching_problems(model)
    yield from _channels_problems(model)
    yield from _window_problems(model)
    if model.family:
        yield from FAMILIES[model.family].problems(model, config.layout)
    if model.moe.experts > 0:
        yield from _experts_problems(config)


def _stretching_problems(model: ModelConfig) -> Iterator[InputError]:
    """Rules about rotary positions that are scaled to a longer context."""
    yarn, rope, with_yarn = model.yarn, model.llama3_rope, layers_of(model.family).yarn
    families = " or ".join(f"model.family={name}" for name in WITH_OWN_LAYERS if layers_of(name).yarn)
    if yarn.factor > 1 and model.attention != "mla" and not with_yarn:
        yield InputError(
            f"model.yarn.factor={yarn.factor}",
            f"only for latent attention and {families}",
            "set model.attention=mla, or model.yarn.factor=1",
        )
    if not yarn.truncate and not with_yarn:
        yield InputError("model.yarn.truncate=false", f"only for {families}", "set model.yarn.truncate=true")
    if rope.high_freq_factor <= rope.low_freq_factor:
        yield InputError(
            f"model.llama3_rope.high_freq_factor={rope.high_freq_factor}",
            f"must be above model.llama3_rope.low_freq_factor={rope.low_freq_factor}",
            "raise it",
        )


def _channels_problems(model: ModelConfig) -> Iterator[InputError]:
    """Rules about the channels of attention heads; rotary positions need an even number."""
    in_pairs = "rotary positions turn channels in pairs"
    rope_dim = model.mla.qk_rope_dim
    if model.attention == "mla":
        if model.kv_heads != model.heads:
            what = "no effect with model.attention=mla, where every head has its own keys"
            yield InputError(f"model.kv_heads={model.kv_heads}", what, f"set model.kv_heads={model.heads}")
        if rope_dim % 2:
            yield InputError(f"model.mla.qk_rope_dim={rope_dim}", in_pairs, f"choose {rope_dim + 1}")
    elif model.head_dim is not None:
        if model.head_dim % 2:
            yield InputError(f"model.head_dim={model.head_dim}", in_pairs, f"choose {model.head_dim + 1}")
    # This is an odd quotient. A hidden size that the heads do not divide is reported by `model_problems`.
    elif model.heads > 0 and model.hidden % (2 * model.heads) == model.heads:
        yield InputError(
            f"model.hidden={model.hidden}",
            f"model.heads={model.heads} heads would have an odd number of channels, and {in_pairs}",
            f"choose {multiples(model.hidden, 2 * model.heads)}",
        )
    channels = model.head_dim or model.hidden // max(model.heads, 1)
    if model.rope_fraction != 1 and model.rope_fraction * channels % 2:
        nearest = max(2, 2 * round(model.rope_fraction * channels / 2))
        yield InputError(
            f"model.rope_fraction={model.rope_fraction}",
            f"not an even number of {channels} channels, and {in_pairs}",
            f"choose {nearest / channels} for {nearest} of them",
        )


def _window_problems(model: ModelConfig) -> Iterator[InputError]:
    """Rules about sliding windows."""
    if model.window is None:
        return
    if model.window_rope_base and model.llama3_rope.factor > 1:
        yield InputError(
            f"model.llama3_rope.factor={model.llama3_rope.factor}",
            f"would scale positions within windows, which have model.window_rope_base={model.window_rope_base}",
            "set model.llama3_rope.factor=1",
        )
    elif model.attention == "mla" or model.mtp_layers:
        yield InputError(
            f"model.window={model.window}",
            "only for grouped-query attention without prediction modules",
            "set model.attention=gqa and model.mtp_layers=0, or model.window=null",
        )


def _experts_problems(config: Config) -> Iterator[InputError]:
    """Rules about a mixture of experts and its router."""
    moe = config.model.moe
    yield from at_most(config, "model.moe.top_k", "model.moe.experts")
    yield from at_most(config, "model.moe.first_dense", "model.layers", margin=1)
    if moe.groups:
        yield from divisible(config, "model.moe.experts", "model.moe.groups")
        # Megatron scores a group by the sum of its top_k / group_top_k best experts (`group_limited_topk`), and rounds
        # that number down without a warning.
        yield from divisible(config, "model.moe.top_k", "model.moe.group_top_k")
        yield from at_most(config, "model.moe.group_top_k", "model.moe.groups")
    # Megatron adds the bias that balances experts without a loss (DeepSeek-V3) to sigmoid scores only.
    if moe.bias_update_rate > 0 and moe.score != "sigmoid":
        yield InputError(
            f"model.moe.bias_update_rate={moe.bias_update_rate}",
            "needs sigmoid scores",
            "set model.moe.score=sigmoid or model.moe.bias_update_rate=0",
        )
    if moe.frozen_bias and (moe.bias_update_rate > 0 or moe.score != "sigmoid"):
        yield InputError(
            "model.moe.frozen_bias=true",
            f"incompatible with model.moe.score={moe.score} and model.moe.bias_update_rate={moe.bias_update_rate}",
            "set model.moe.score=sigmoid and model.moe.bias_update_rate=0, or model.moe.frozen_bias=false",
        )
    if moe.top_k == 1 and moe.score == "softmax":
        yield InputError(
            "model.moe.top_k=1",
            "the router has no gradient with model.moe.score=softmax, which is taken over the chosen experts",
            "set model.moe.top_k=2 or model.moe.score=sigmoid",
        )
    # Routing limited to groups: both settings or none, and enough experts within reach of a token.
    if (moe.groups > 0) != (moe.group_top_k > 0):
        yield InputError(
            f"model.moe.groups={moe.groups}",
            f"needs model.moe.group_top_k, now {moe.group_top_k}, to be set too",
            "set both above 0 for group-limited routing, or both to 0",
        )
    elif moe.groups > 0 and moe.top_k * moe.groups > moe.group_top_k * moe.experts:
        reach = moe.group_top_k * moe.experts // moe.groups
        yield InputError(
            f"model.moe.top_k={moe.top_k}",
            f"more than the {reach} experts of model.moe.group_top_k={moe.group_top_k} groups",
            f"lower model.moe.top_k to {reach} or raise model.moe.group_top_k",
        )
