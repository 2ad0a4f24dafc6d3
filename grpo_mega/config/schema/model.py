"""The policy's architecture: sizes, attention, experts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from omegaconf import MISSING

from grpo_mega.config.limits import Interval, IsSet, OneOf, With
from grpo_mega.models.families import WITH_OWN_LAYERS

GROUPED = With("attention", OneOf("gqa"))
WINDOWED = With("window", IsSet())


@dataclass
class MoEConfig:
    """Mixture of experts."""

    experts: Annotated[int, Interval("[0, inf)")] = 0
    """Routed experts per MoE layer; 0 for a dense model."""
    top_k: Annotated[int, Interval("[1, inf)")] = 2
    """Experts each token is sent to."""
    ffn_hidden: Annotated[int, Interval("[1, inf)")] = 64
    """Hidden size of one routed expert."""
    shared_ffn_hidden: Annotated[int, Interval("[0, inf)")] = 0
    """Hidden size of the shared expert, which every token visits; 0 for none."""
    first_dense: Annotated[int, Interval("[0, inf)")] = 0
    """First layers that are dense (DeepSeek-V3: 3)."""
    score: Annotated[str, OneOf("sigmoid", "softmax")] = "sigmoid"
    """Router scores: sigmoid (DeepSeek-V3) or softmax."""
    bias_update_rate: Annotated[float, Interval("[0, inf)")] = 1e-3
    """Update rate of the auxiliary-loss-free balancing bias (DeepSeek-V3, section 2.1.2); 0 turns it off. Needs
    sigmoid."""
    frozen_bias: bool = False
    """Keep the balancing bias as it was loaded; needs bias_update_rate=0."""
    aux_loss_coef: Annotated[float, Interval("[0, inf)")] = 0.0
    """Coefficient of the balance loss within each sequence (DeepSeek-V3, equations 17 to 20: 0.0001)."""
    z_loss_coef: Annotated[float, Interval("[0, inf)")] = 0.0
    """Coefficient of the router's z-loss (ST-MoE, equation 5), which keeps its logits small."""
    groups: Annotated[int, Interval("[0, inf)")] = 0
    """Group-limited routing: expert groups; 0 for none."""
    group_top_k: Annotated[int, Interval("[0, inf)")] = 0
    """Group-limited routing: groups a token may use."""
    scaling: Annotated[float, Interval("(0, inf)")] = 1.0
    """Factor on the routed experts' output (DeepSeek-V3: 2.5)."""


@dataclass
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, section 2.1); read when `model.attention` is mla."""

    q_lora_rank: Annotated[int | None, Interval("[1, inf)")] = 32
    """Rank of the compressed query; null for queries that are not compressed (Moonlight)."""
    kv_lora_rank: Annotated[int, Interval("[1, inf)")] = 16
    """Rank of the compressed key and value."""
    qk_head_dim: Annotated[int, Interval("[1, inf)")] = 16
    """Query and key channels per head without rotary position."""
    qk_rope_dim: Annotated[int, Interval("[1, inf)")] = 8
    """Query and key channels per head with rotary position."""
    v_head_dim: Annotated[int, Interval("[1, inf)")] = 16
    """Value channels per head."""


@dataclass
class YarnConfig:
    """YaRN (Peng et al., 2023): rotary positions scaled to a longer context; for latent attention and for GPT-OSS."""

    factor: Annotated[float, Interval("[1, inf)")] = 1.0
    """Factor by which the context is extended (DeepSeek-V3: 40); 1 for plain rotary positions."""
    original_context: Annotated[int, Interval("[1, inf)")] = 4096
    """Context of pre-training, in tokens."""
    beta_fast: Annotated[float, Interval("(0, inf)")] = 32.0
    """Channels that rotate more often than this within the original context keep their frequency."""
    beta_slow: Annotated[float, Interval("(0, inf)")] = 1.0
    """Channels that rotate less often are slowed down by `factor`; those in between by less."""
    mscale: Annotated[float, Interval("(0, inf)")] = 1.0
    """Attention logits are multiplied by (0.1 * mscale * ln(factor) + 1)^2; `mscale_all_dim` in DeepSeek's files."""
    truncate: bool = True
    """Round the bounds between these channels to whole channel pairs (DeepSeek-V3); false for GPT-OSS."""


@dataclass
class Llama3RopeConfig:
    """Rotary positions scaled to a longer context as in Llama 3.1."""

    factor: Annotated[float, Interval("[1, inf)")] = 1.0
    """Factor by which slow channels are slowed down further (Llama 3.1: 8); 1 for plain rotary positions."""
    original_context: Annotated[int, Interval("[1, inf)")] = 8192
    """Context of pre-training, in tokens."""
    low_freq_factor: Annotated[float, Interval("(0, inf)")] = 1.0
    """Channels that rotate less often than this within the original context are slowed down by `factor`."""
    high_freq_factor: Annotated[float, Interval("(0, inf)")] = 4.0
    """Channels that rotate more often keep their frequency; those in between are slowed down less."""


@dataclass
class ModelConfig:
    """The policy's architecture."""

    layers: Annotated[int, Interval("[1, 10000]")] = MISSING
    """Transformer layers."""
    hidden: Annotated[int, Interval("[1, 16777216]")] = MISSING
    """Hidden size."""
    heads: Annotated[int, Interval("[1, 16777216]")] = MISSING
    """Attention heads."""
    kv_heads: Annotated[int, Interval("[1, 16777216]")] = MISSING
    """Key-value heads of grouped-query attention; `heads` for plain multi-head attention."""
    head_dim: Annotated[int | None, Interval("[1, inf)"), GROUPED] = None
    """Channels per head of grouped-query attention (Qwen3: 128); null for hidden / heads."""
    ffn_hidden: Annotated[int, Interval("[1, 16777216]")] = MISSING
    """Hidden size of a dense feed-forward layer: SwiGLU, or GeGLU with `family=gemma3_text`."""
    context: Annotated[int, Interval("[1, inf)")] = MISSING
    """Longest sequence, prompt and completion, in tokens."""
    attention: Annotated[str, OneOf("gqa", "mla")] = "gqa"
    """gqa (grouped-query) or mla (multi-head latent)."""
    qk_norm: bool = False
    """RMSNorm on queries and keys (Qwen3)."""
    qkv_bias: Annotated[bool, GROUPED] = False
    """Bias on queries, keys and values (Qwen2.5)."""
    tie_embeddings: bool = False
    """Share input embedding and output weights."""
    rope_base: Annotated[int, Interval("[1, inf)")] = 10000
    """Base of the rotary frequencies."""
    rope_fraction: Annotated[float, Interval("(0, 1]"), GROUPED] = 1.0
    """Fraction of a head's channels, the first ones, with rotary positions (GLM-4.5: 0.5)."""
    window: Annotated[int | None, Interval("[1, inf)")] = None
    """Sliding window: tokens that each token attends to, itself included (Mistral-7B-v0.1: 4096); null for full
    attention. For grouped-query attention."""
    full_every: Annotated[int, Interval("[0, inf)"), WINDOWED] = 0
    """Period of the layers with full attention in place of the window (Gemma 3: 6); 0 for none."""
    window_rope_base: Annotated[int | None, Interval("[1, inf)"), WINDOWED] = None
    """Base of the rotary frequencies in layers with the window (Gemma 3: 10000); null for `rope_base`."""
    query_pre_attn_scalar: Annotated[int | None, Interval("[1, inf)"), GROUPED] = None
    """Attention logits are divided by the square root of this (Gemma 3); null for head_dim."""
    family: Annotated[str | None, OneOf(*WITH_OWN_LAYERS)] = None
    """Family whose layers differ from Llama's beyond the other settings: gemma3_text (norms also after attention and
    feed-forward, GELU, scaled embeddings) or gpt_oss (attention sinks, biases everywhere, clamped experts)."""
    norm_eps: Annotated[float, Interval("(0, inf)")] = 1e-6
    """Epsilon of RMSNorm."""
    init_std: Annotated[float, Interval("(0, inf)", "with 0 every channel stays the same")] = 0.02
    """Standard deviation of the initial weights."""
    vocab_size: Annotated[
        int | None, Interval("[1, 10000000]", "today's largest vocabularies have some 300,000 tokens")
    ] = None
    """Vocabulary size of embedding and output layer, if larger than the tokenizer's (released models)."""
    vocab_multiple: Annotated[int, Interval("[1, inf)")] = 32
    """The vocabulary is padded to a multiple of this, whatever the layout; padding is never sampled."""
    dtype: Annotated[str, OneOf("fp32", "bf16")] = "fp32"
    """Type of parameters and activations: fp32, or bf16 (with fp32 master weights)."""
    mtp_layers: Annotated[int, Interval("[0, inf)")] = 0
    """Multi-token prediction modules (DeepSeek-V3: 1); 0 for none. They learn to draft the policy's tokens."""
    mtp_loss_coef: Annotated[float, Interval("(0, inf)")] = 0.1
    """Coefficient of the prediction modules' loss, the mean over depths and trained tokens; it trains only these
    modules, outside the gradient norm."""
    moe: MoEConfig = field(default_factory=MoEConfig)
    mla: MLAConfig = field(default_factory=MLAConfig)
    yarn: YarnConfig = field(default_factory=YarnConfig)
    llama3_rope: Annotated[Llama3RopeConfig, GROUPED] = field(default_factory=Llama3RopeConfig)
