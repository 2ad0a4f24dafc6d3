"""Low-rank adapters, trained while the loaded weights are frozen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from grpo_mega.config.limits import Interval


@dataclass
class LoRAConfig:
    """LoRA (Hu et al., 2021, arXiv 2106.09685): W x becomes W x + alpha / rank * B (A x); only A and B are trained."""

    rank: Annotated[int, Interval("[0, inf)")] = 0
    """Rows of A, columns of B; 0 trains all weights and has no adapters."""
    alpha: Annotated[float, Interval("(0, inf)")] = 32.0
    """Scale of the adapters' output, which is multiplied by alpha / rank."""
    targets: list[str] = field(default_factory=lambda: ["attention", "mlp", "experts"])
    """Matrices with adapters, by Hugging Face's names. attention: q_proj, k_proj, v_proj and o_proj; of latent
    attention q_proj, or q_a_proj and q_b_proj, kv_a_proj_with_mqa, kv_b_proj and o_proj. mlp: gate_proj, up_proj and
    down_proj of dense layers and of the shared expert. experts: those of every routed expert."""
