"""DeepSeek-V3 and R1: latent attention, experts with a balancing bias, a shared expert, prediction modules.

GLM-4.5 shares the experts, and Kimi-K2 everything; their files import them from here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from grpo_mega.models.families.family import COMMON, EXPERTS, SILU, Family, FoundConfig

if TYPE_CHECKING:
    from grpo_mega.config.schema import ModelConfig

BALANCED_EXPERTS = EXPERTS | {
    "n_routed_experts": "moe.experts",
    "first_k_dense_replace": "moe.first_dense",
    "routed_scaling_factor": "moe.scaling",
    "num_nextn_predict_layers": "mtp_layers",
}
# The bias was frozen at the end of pre-training.
FROZEN = {"score": "sigmoid", "bias_update_rate": 0.0, "frozen_bias": True}


def refuses_no_shared_expert(found: FoundConfig) -> Iterator[str]:
    """Yields a refusal of a model without a shared expert."""
    if not found.get("n_shared_experts"):
        yield "n_shared_experts=0 (only 1 or more)"


def written_experts(model: ModelConfig) -> dict[str, Any]:
    """Expert settings in the words of config.json."""
    moe = model.moe
    return {
        "n_shared_experts": moe.shared_ffn_hidden // moe.ffn_hidden,
        "n_group": moe.groups or 1,
        "topk_group": moe.group_top_k or 1,
        # Megatron normalises the weights of several experts, but not that of a single one.
        "norm_topk_prob": moe.top_k > 1,
    }


def _stretched(kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    """In the names that DeepSeek's own code knows."""
    # Here both factors are always equal: a config.json in which they differ is refused.
    return {"type": kind, **settings, "mscale": settings["mscale_all_dim"]}


DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    fields=COMMON | BALANCED_EXPERTS | {
        "q_lora_rank": "mla.q_lora_rank",
        "kv_lora_rank": "mla.kv_lora_rank",
        "qk_nope_head_dim": "mla.qk_head_dim",
        "qk_rope_head_dim": "mla.qk_rope_dim",
        "v_head_dim": "mla.v_head_dim",
    },
    fixed=SILU | {
        "rope_interleave": True, "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    },
    always={"attention": "mla", "qk_norm": True, "moe": FROZEN},
    assumed={"n_group": 8, "norm_topk_prob": True, "topk_group": 4},
    rope=("yarn",),
    balanced=True,
    refused=refuses_no_shared_expert,
    written=written_experts,
    stretched=_stretched,

)  # fmt: skip
