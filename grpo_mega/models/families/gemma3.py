"""Gemma 3, text (Gemma team, 2025): norms that multiply by 1 + weight, also after attention and after feed-forward;
GELU in its tanh form; embeddings multiplied by sqrt(hidden); windows in five of six layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from grpo_mega.errors import InputError
from grpo_mega.models.families.family import GROUPED, WINDOW, Family, Layers

if TYPE_CHECKING:
    from grpo_mega.config.schema import LayoutConfig, ModelConfig


def _problems(model: ModelConfig, _: LayoutConfig) -> Iterator[InputError]:
    if model.attention == "mla" or model.moe.experts or model.mtp_layers:
        yield InputError(
            "model.family=gemma3_text",
            "only for dense layers with grouped-query attention",
            "set model.attention=gqa, model.moe.experts=0 and model.mtp_layers=0, or model.family=null",
        )


def _obstacles(model: ModelConfig) -> Iterator[str]:
    for field in ("window_rope_base", "query_pre_attn_scalar"):
        if not getattr(model, field):
            yield f"model.{field}={getattr(model, field)} (set it)"


GEMMA3 = Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    fields=GROUPED | WINDOW | {"query_pre_attn_scalar": "query_pre_attn_scalar"},
    fixed={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "use_bidirectional_attention": False},
    always={"family": "gemma3_text", "qk_norm": True},
    assumed={"head_dim": 256, "rope_theta": 1e6, "tie_word_embeddings": True},
    layers=Layers(
        activation="gelu_tanh",
        megatron={"layernorm_zero_centered_gamma": True},
        post_norms=True,
        scaled_embedding=True,
        sglang_windows=True,
    ),
    window="must",
    full_every=6,
    layer_types=True,
    inner_rope=True,
    formerly="gemma",
    rope=(),
    obstacles=_obstacles,
    problems=_problems,
    has_head_dim=True,
)
