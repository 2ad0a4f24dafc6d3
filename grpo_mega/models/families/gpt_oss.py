"""GPT-OSS (OpenAI, 2025): a learned sink for every attention head; biases in all projections and in the router; experts
whose gate and its factor are clamped: x sigmoid(1.702 x) (y + 1); windows in every second layer; YaRN.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from grpo_mega.errors import InputError
from grpo_mega.models.families.family import GROUPED, WINDOW, Family, FoundConfig, Layers

if TYPE_CHECKING:
    from grpo_mega.config.schema import LayoutConfig, ModelConfig

LIMIT = 7.0
"""Upper bound of an expert's gate, and bound in both directions of what the gate multiplies."""
_DEFAULTS = {
    "attention_bias": True, "head_dim": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 150000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    "sliding_window": 128, "swiglu_alpha": 1.702, "swiglu_limit": LIMIT,
}  # fmt: skip


def _problems(model: ModelConfig, layout: LayoutConfig) -> Iterator[InputError]:
    unlike = {
        "model.attention": (model.attention, "gqa"),
        "model.qkv_bias": (model.qkv_bias, True),
        "model.qk_norm": (model.qk_norm, False),
        "model.window_rope_base": (model.window_rope_base, None),
        "model.query_pre_attn_scalar": (model.query_pre_attn_scalar, None),
        "model.ffn_hidden": (model.ffn_hidden, model.moe.ffn_hidden),
        "model.mtp_layers": (model.mtp_layers, 0),
        "model.llama3_rope.factor": (model.llama3_rope.factor, 1.0),
        "model.moe.score": (model.moe.score, "softmax"),
        "model.moe.shared_ffn_hidden": (model.moe.shared_ffn_hidden, 0),
        "model.moe.first_dense": (model.moe.first_dense, 0),
    }
    for name, (given, known) in unlike.items():
        if given != known:
            there, wanted = (value if isinstance(value, str) else json.dumps(value) for value in (given, known))
            what = f"the layers of model.family=gpt_oss have only {wanted}"
            yield InputError(f"{name}={there}", what, f"set {name}={wanted}, or model.family=null")
    if not model.moe.experts:
        fix = "set model.moe.experts above 0, or model.family=null"
        yield InputError("model.family=gpt_oss", "needs experts", fix)
    if model.window is None:
        yield InputError("model.window=null", "the layers of model.family=gpt_oss have a window", "set model.window")
    if layout.etp > 1:
        what = "Megatron cannot split experts with biases (model.family=gpt_oss)"
        yield InputError(f"layout.etp={layout.etp}", what, "set layout.etp=1")


def _obstacles(model: ModelConfig) -> Iterator[str]:
    if model.ffn_hidden != model.moe.ffn_hidden:
        yield f"model.ffn_hidden={model.ffn_hidden} (set {model.moe.ffn_hidden}, as model.moe.ffn_hidden)"


def _read(found: FoundConfig) -> dict[str, Any]:
    # The width of dense layers, of which the model has none; the key gives that of its experts.
    return {"ffn_hidden": found.get("intermediate_size")}


GPT_OSS = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    fields=GROUPED | WINDOW | {
        "intermediate_size": "moe.ffn_hidden",
        "num_experts_per_tok": "moe.top_k",
        "num_local_experts": "moe.experts",
    },
    also=("ffn_hidden",),
    fixed={"hidden_act": "silu", "attention_bias": True, "swiglu_limit": LIMIT, "swiglu_alpha": 1.702},
    always={"family": "gpt_oss", "qkv_bias": True, "moe": {"score": "softmax", "bias_update_rate": 0.0}},
    assumed=_DEFAULTS,
    layers=Layers(
        activation="quick_gelu",
        megatron={"glu_linear_offset": 1.0, "activation_func_clamp_value": LIMIT},
        sinks=True,
        yarn=True,
        biased=True,
        stacked=True,
        # Megatron's clamped activation keeps the results of most of its operations.
        kept=16,
        sglang=False,
    ),
    window="must",
    full_every=2,
    layer_types=True,
    rope=("yarn",),
    formerly="gpt_oss",
    mxfp4=True,
    obstacles=_obstacles,
    problems=_problems,
    read=_read,
    # Without the key transformers would assume the YaRN of the released models.
    plain_rope={"rope_type": "default"},
    has_head_dim=True,
)  # fmt: skip
