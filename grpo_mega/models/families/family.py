"""Description of a family of released models: its config.json, and how its layers differ from Llama's.

Torch is not imported: jobs are checked on machines without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_mega.config.schema import LayoutConfig, ModelConfig
    from grpo_mega.errors import InputError

FoundConfig = dict[str, Any]
"""Content of a config.json."""


@dataclass(frozen=True)
class Layers:
    """How the layers of a family differ from Llama's, whatever their attention and with or without experts.

    Attributes:
        activation: Function of the gate of a feed-forward layer: silu, gelu_tanh or quick_gelu.
        megatron: Further fields of Megatron's TransformerConfig.
        post_norms: Whether there are norms also after attention and after feed-forward.
        scaled_embedding: Whether embeddings are multiplied by sqrt(hidden).
        sinks: Whether every attention head has a learned sink.
        yarn: Whether grouped-query attention may be stretched by YaRN, with bounds that are not rounded.
        biased: Whether the output of attention, the router and experts have biases.
        stacked: Whether the tensors of all experts of a layer are stored as one.
        kept: Bytes, in bf16, that the activation keeps of each inner channel of an expert for its backward pass.
        sglang: Whether computing these layers with SGLang has been tested.
        sglang_windows: The same with sliding windows.
    """

    activation: str = "silu"
    megatron: Mapping[str, Any] = field(default_factory=dict)
    post_norms: bool = False
    scaled_embedding: bool = False
    sinks: bool = False
    yarn: bool = False
    biased: bool = False
    stacked: bool = False
    kept: int = 6
    sglang: bool = True
    sglang_windows: bool = False

    @property
    def clamped(self) -> bool:
        """Whether experts' gates are clamped, which only Megatron's own activation can do."""
        return "activation_func_clamp_value" in self.megatron


LLAMA = Layers()


def no_problems(*_: Any) -> Iterator[Any]:
    """Finds nothing."""
    return iter(())


def no_more(_: Any) -> dict[str, Any]:
    """Adds nothing."""
    return {}


@dataclass(frozen=True)
class Family:
    """A family of models in the Hugging Face format.

    Attributes:
        name: transformers' `model_type`.
        architecture: Class in transformers.
        fields: Key of config.json -> field of `ModelConfig` with the same value.
        also: Further fields of `ModelConfig`, which `read` and `written` translate. A model is exported as this family
            only if every field that is stated nowhere has the value in `always`, or else its default.
        fixed: Values that config.json must have, as no field of `ModelConfig` can express others.
        always: Settings that all models of the family share, nested as in `ModelConfig`.
        assumed: Defaults of missing keys, where they differ from `config_json.ASSUMED`.
        layers: How its layers differ from Llama's.
        same_as: Family that computes the same function from the same tensors, within a window if there is one.
        window: Sliding windows: "" (none), "may" (left out where it covers the context) or "must".
        full_every: Usual period of layers with full attention between those with a window.
        layer_types: Whether config.json lists the kind of attention of every layer.
        inner_rope: Whether layers with a window have their own rotary positions.
        rope: Ways of stretching rotary positions: "llama3", "yarn".
        partly_rotary: Whether only a part of a head's channels may have rotary positions.
        balanced: Whether routers have a balancing bias, as DeepSeek-V3's; then there is a shared expert as well.
        formerly: Setting of earlier releases, model.NAME=true, that meant these layers.
        has_head_dim: Whether the default of a missing `head_dim` is a number of the family, not hidden / heads.
        mxfp4: Whether experts may be stored in 4 bits.
        obstacles: The settings of a model that the family cannot express, beyond what the fields above say.
        problems: Violated rules about a configuration whose `model.family` this is.
        refused: Features that a config.json asks for and no model can have here, beyond what the fields above say.
        read: Nested settings from a config.json, beyond `fields`.
        written: Keys of config.json from a model, beyond `fields`.
        stretched: config.json's `rope_scaling` from the kind and its settings.
        plain_rope: config.json's `rope_scaling` of positions that are not stretched.
    """

    name: str
    architecture: str
    fields: Mapping[str, str]
    fixed: Mapping[str, Any]
    also: tuple[str, ...] = ()
    always: Mapping[str, Any] = field(default_factory=dict)
    assumed: Mapping[str, Any] = field(default_factory=dict)
    layers: Layers = LLAMA
    same_as: str | None = None
    window: str = ""
    full_every: int = 0
    layer_types: bool = False
    inner_rope: bool = False
    rope: tuple[str, ...] = ("llama3",)
    partly_rotary: bool = False
    balanced: bool = False
    formerly: str = ""
    has_head_dim: bool = False
    mxfp4: bool = False
    obstacles: Callable[[ModelConfig], Iterator[str]] = no_problems
    problems: Callable[[ModelConfig, LayoutConfig], Iterator[InputError]] = no_problems
    refused: Callable[[FoundConfig], Iterator[str]] = no_problems
    read: Callable[[FoundConfig], dict[str, Any]] = no_more
    written: Callable[[ModelConfig], dict[str, Any]] = no_more
    stretched: Callable[[str, dict[str, Any]], dict[str, Any]] = lambda kind, settings: {"rope_type": kind, **settings}
    plain_rope: Mapping[str, Any] | None = None

    @property
    def has_experts(self) -> bool:
        """Whether its models are mixtures of experts."""
        return "moe.experts" in self.fields.values()


# Kinds of the fields of `ModelConfig` that families state. Those in none of these are sizes: whole numbers from 1.
NUMBERS = {"norm_eps", "moe.scaling"}
FLAGS = {"tie_embeddings", "qk_norm", "qkv_bias"}
COUNTS = {"mtp_layers", "moe.first_dense"}
"""Whole numbers from 0."""
MAY_BE_NULL = {"window", "mla.q_lora_rank"}
"""Sizes whose null means none."""

COMMON = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "ffn_hidden",
    "max_position_embeddings": "context",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}
"""Keys that all families have."""
GROUPED = COMMON | {"head_dim": "head_dim"}
"""Keys of grouped-query attention."""
WINDOW = {"sliding_window": "window"}
EXPERTS = {"num_experts_per_tok": "moe.top_k", "moe_intermediate_size": "moe.ffn_hidden"}
SILU = {"hidden_act": "silu", "attention_bias": False}
