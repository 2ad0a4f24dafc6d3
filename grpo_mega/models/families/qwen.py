"""Qwen2.5, with biases on queries, keys and values; Qwen3, with norms on queries and keys, dense and with experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from grpo_mega.models.families.family import EXPERTS, GROUPED, SILU, Family, FoundConfig

if TYPE_CHECKING:
    from grpo_mega.config.schema import ModelConfig

_NO_WINDOW = {"use_sliding_window": False}


def _refused(found: FoundConfig) -> Iterator[str]:
    # `moe.first_dense` expresses only dense layers at the beginning.
    only = found.get("mlp_only_layers") or []
    if only != [*range(len(only))]:
        yield f"mlp_only_layers={only} (only the first layers)"


def _read(found: FoundConfig) -> dict[str, Any]:
    return {"moe": {"first_dense": len(found.get("mlp_only_layers") or [])}}


def _written(model: ModelConfig) -> dict[str, Any]:
    return {"mlp_only_layers": [*range(model.moe.first_dense)]}


QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    fields=GROUPED,
    fixed=SILU | _NO_WINDOW,
    always={"qk_norm": True},
    has_head_dim=True,
)
QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    fields=GROUPED,
    fixed={"hidden_act": "silu"} | _NO_WINDOW,
    always={"qkv_bias": True},
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fields=GROUPED | EXPERTS | {"num_experts": "moe.experts"},
    also=("moe.first_dense",),
    fixed=SILU | _NO_WINDOW | {"decoder_sparse_step": 1, "norm_topk_prob": True},
    always={"qk_norm": True, "moe": {"score": "softmax", "bias_update_rate": 0.0}},
    refused=_refused,
    read=_read,
    written=_written,
    has_head_dim=True,
)
