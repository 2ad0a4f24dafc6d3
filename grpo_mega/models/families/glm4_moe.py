"""GLM-4.5: grouped-query attention in which half of the channels turn, and DeepSeek-V3's experts."""

from grpo_mega.models.families.deepseek import BALANCED_EXPERTS, FROZEN, refuses_no_shared_expert, written_experts
from grpo_mega.models.families.family import GROUPED, Family

GLM4_MOE = Family(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    fields=GROUPED | BALANCED_EXPERTS | {"use_qk_norm": "qk_norm", "attention_bias": "qkv_bias"},
    fixed={"hidden_act": "silu"},
    always={"moe": FROZEN},
    assumed={
        "n_group": 1, "norm_topk_prob": True, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "topk_group": 1,
    },
    partly_rotary=True,
    balanced=True,
    refused=refuses_no_shared_expert,
    written=written_experts,
)  # fmt: skip
