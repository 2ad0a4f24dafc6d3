"""Builds a Megatron GPTModel from the configuration: dense or mixture of experts, grouped-query or latent attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from grpo_mega.config.schema import LayoutConfig, LoRAConfig, ModelConfig, MoEConfig, YarnConfig
from grpo_mega.models.chunks import ModelChunks
from grpo_mega.models.families import layers_of
from grpo_mega.models.megatron.changes import TO_CHUNK, TO_SPECIFICATION, Chunk, Specification, apply_changes
from grpo_mega.models.megatron.dispatch import dispatch_options
from grpo_mega.models.megatron.layers import gelu_tanh
from grpo_mega.models.megatron.te_kernels import eight_bit_options, fused_options
from grpo_mega.platform import Platform

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": dict(recompute_granularity="selective", recompute_modules=["core_attn"]),
    "full": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
}
_UNUSED_FUSIONS: dict[str, Any] = dict(
    masked_softmax_fusion=False,
    gradient_accumulation_fusion=False,
    bias_dropout_fusion=False,
    persist_layer_norm=False,
)
"""Fusions that need Apex, or are of Megatron's own attention and dropout, which are not used here."""


def build_model(
    model: ModelConfig,
    layout: LayoutConfig,
    vocab_size: int,
    platform: Platform,
    scalar: bool = False,
    lora: LoRAConfig | None = None,
) -> ModelChunks:
    """This rank's pieces of the model, weights not yet initialised; with a `scalar` head or a language model's.

    `vocab_size` is the tokenizer's; the embedding is padded to a multiple of `model.vocab_multiple` rows. With `lora`
    the model has adapters.
    """
    config = transformer_config(model, layout, platform)
    chunks = [_build_chunk(config, model, vocab_size, platform, i, scalar, lora) for i in range(layout.vpp)]
    return ModelChunks(chunks).to(platform.device)


def _build_chunk(
    config: TransformerConfig,
    model: ModelConfig,
    vocab_size: int,
    platform: Platform,
    chunk: int,
    scalar: bool,
    lora: LoRAConfig | None,
) -> GPTModel:
    vp_stage = chunk if config.virtual_pipeline_model_parallel_size else None
    specification = Specification(model, platform.transformer_engine, scalar)
    apply_changes(TO_SPECIFICATION, specification)
    spec = get_gpt_decoder_block_spec(config, platform.transformer_engine, normalization="RMSNorm", vp_stage=vp_stage)
    spec = _replace(spec, specification.replacements)
    ahead = get_gpt_mtp_block_spec(config, spec, platform.transformer_engine, vp_stage) if model.mtp_layers else None
    gpt = specification.replacements.get(GPTModel, GPTModel)(
        config=config,
        transformer_layer_spec=spec,
        mtp_block_spec=_replace(ahead, specification.replacements),
        vocab_size=padded_vocabulary(model, vocab_size),
        max_sequence_length=model.context,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        parallel_output=True,
        share_embeddings_and_output_weights=model.tie_embeddings,
        # Rotary positions are applied within the attention.
        position_embedding_type="none",
        vp_stage=vp_stage,
    )
    apply_changes(TO_CHUNK, Chunk(gpt, model, vocab_size, lora, platform.transformer_engine))
    return gpt


def padded_vocabulary(model: ModelConfig, vocab_size: int) -> int:
    """Rows of the embedding: the vocabulary size rounded up."""
    return -(-vocab_size // model.vocab_multiple) * model.vocab_multiple


def has_balancing_bias(moe: MoEConfig) -> bool:
    """Whether the routers choose experts by score plus bias."""
    return moe.bias_update_rate > 0 or moe.frozen_bias


def head_channels(model: ModelConfig) -> int:
    """Channels per head of grouped-query attention."""
    return model.head_dim or model.hidden // model.heads


def transformer_config(model: ModelConfig, layout: LayoutConfig, platform: Platform) -> TransformerConfig:
    """Megatron's configuration of this architecture and layout."""
    options: dict[str, Any] = dict(
        **_model_options(model),
        **_layout_options(model, layout, platform),
        **_UNUSED_FUSIONS,
        **fused_options(model, _activation(model), platform.transformer_engine),
        **eight_bit_options(layout, platform),
        **dispatch_options(model, layout, platform),
        **_initial_values(platform),
        **(_moe_options(model.moe, model.layers, platform) if model.moe.experts else {}),
    )
    if model.attention == "gqa":
        return TransformerConfig(
            **options,
            num_query_groups=model.kv_heads,
            kv_channels=head_channels(model),
            add_qkv_bias=model.qkv_bias,
            softmax_scale=model.query_pre_attn_scalar and model.query_pre_attn_scalar**-0.5,
        )
    return MLATransformerConfig(**options, **_latent_options(model))


def _model_options(model: ModelConfig) -> dict[str, Any]:
    """Megatron's settings of the architecture, without those of attention and experts."""
    dtype = DTYPES[model.dtype]
    options: dict[str, Any] = dict(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        mtp_num_layers=model.mtp_layers or None,
        ffn_hidden_size=model.ffn_hidden,
        qk_layernorm=model.qk_norm,
        layernorm_epsilon=model.norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=_activation(model),
        add_bias_linear=layers_of(model.family).biased,
        # Old, current and reference log-probs of a token are compared, so no pass may draw random numbers.
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # Megatron's initial values are overwritten (shards.py), but until 0.17.1 it marks the parameters that are split
        # over tensor parallel ranks only when it initialises them, and the gradient norm needs these marks
        # (docs/parity.md, defect 3).
        perform_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
    )
    return options | dict(layers_of(model.family).megatron)


def _layout_options(model: ModelConfig, layout: LayoutConfig, platform: Platform) -> dict[str, Any]:
    """Megatron's settings of parallelism, recomputation and communication between pipeline stages."""
    return dict(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        # A dense model next to one with experts is replicated over the ranks that share experts.
        expert_model_parallel_size=layout.ep if model.moe.experts else 1,
        expert_tensor_parallel_size=layout.etp,
        context_parallel_size=layout.cp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        num_layers_in_first_pipeline_stage=layout.first_stage_layers,
        num_layers_in_last_pipeline_stage=layout.last_stage_layers,
        sequence_parallel=layout.sp,
        **_RECOMPUTE[layout.recompute],
        variable_seq_lengths=layout.pp > 1,
        # Interleaved stages send in both directions at once, which Megatron keeps apart only in this mode when the
        # previous stage is also the next one (pp = 2). gloo has no batched point-to-point operations on CPU tensors.
        overlap_p2p_comm=layout.vpp > 1,
        batch_p2p_comm=platform.backend == "nccl" and layout.vpp == 1,
        # True would make the host wait after every message, for the sake of older versions of torch.
        batch_p2p_sync=False,
    )


def _latent_options(model: ModelConfig) -> dict[str, Any]:
    """Megatron's settings of multi-head latent attention."""
    mla = model.mla
    return dict(
        multi_latent_attention=True,
        q_lora_rank=mla.q_lora_rank,
        kv_lora_rank=mla.kv_lora_rank,
        qk_head_dim=mla.qk_head_dim,
        qk_pos_emb_head_dim=mla.qk_rope_dim,
        v_head_dim=mla.v_head_dim,
        rotary_base=model.rope_base,
        **_yarn_options(model.yarn),
    )


def _initial_values(platform: Platform) -> dict[str, Any]:
    """Settings that leave out initial values on the meta device, where drawing them takes longer than all the rest."""
    if platform.device.type != "meta":
        return {}

    def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    return dict(init_method=as_it_is, output_layer_init_method=as_it_is)


def _activation(model: ModelConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    """Activation function of the gate of a feed-forward layer."""
    known: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "silu": torch.nn.functional.silu, "gelu_tanh": gelu_tanh, "quick_gelu": quick_gelu,
    }  # fmt: skip
    return known[layers_of(model.family).activation]


def _yarn_options(yarn: YarnConfig) -> dict[str, Any]:
    if yarn.factor == 1:
        return dict(rope_type="rope")
    return dict(
        rope_type="yarn",
        rotary_scaling_factor=yarn.factor,
        original_max_position_embeddings=yarn.original_context,
        beta_fast=yarn.beta_fast,
        beta_slow=yarn.beta_slow,
        # Megatron multiplies sines and cosines by the ratio of mscale and mscale_all_dim, and logits by the square of
        # the latter.
        mscale=yarn.mscale,
        mscale_all_dim=yarn.mscale,
    )


def _moe_options(moe: MoEConfig, layers: int, platform: Platform) -> dict[str, Any]:
    return dict(
        num_moe_experts=moe.experts,
        moe_router_topk=moe.top_k,
        moe_ffn_hidden_size=moe.ffn_hidden,
        moe_shared_expert_intermediate_size=moe.shared_ffn_hidden or None,
        moe_layer_freq=[0] * moe.first_dense + [1] * (layers - moe.first_dense),
        moe_router_score_function=moe.score,
        moe_router_enable_expert_bias=has_balancing_bias(moe),
        moe_router_bias_update_rate=moe.bias_update_rate,
        moe_router_load_balancing_type="seq_aux_loss" if moe.aux_loss_coef else "none",
        moe_aux_loss_coeff=moe.aux_loss_coef,
        moe_z_loss_coeff=moe.z_loss_coef or None,
        moe_router_num_groups=moe.groups or None,
        moe_router_group_topk=moe.group_top_k or None,
        moe_router_topk_scaling_factor=moe.scaling,
        moe_router_dtype="fp32",
        # Without Transformer Engine the experts of a rank are computed one after the other.
        moe_grouped_gemm=platform.transformer_engine,
    )


def _replace(spec: Any, replacements: dict[type, Any]) -> Any:
    """A Megatron layer or block spec with module classes replaced wherever they occur."""
    if isinstance(spec, ModuleSpec) or (dataclasses.is_dataclass(spec) and not isinstance(spec, type)):
        fields = {f.name: _replace(getattr(spec, f.name), replacements) for f in dataclasses.fields(spec)}
        return dataclasses.replace(spec, **fields)
    if isinstance(spec, list):
        return [_replace(item, replacements) for item in spec]
    return replacements.get(spec, spec) if isinstance(spec, type) else spec
