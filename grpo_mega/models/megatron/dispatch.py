"""How tokens get to their experts on other GPUs and back: NCCL's all-to-all, or DeepEP's kernels.

A token that goes to several experts of one machine crosses the network once with DeepEP, and with NCCL once for each
expert. Megatron's "flex" dispatcher calls it; its kernels run beside others (`async_finish`).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from grpo_mega.config.schema import LayoutConfig, ModelConfig
from grpo_mega.platform import Platform

KEPT = (
    "token_probs",
    "token_indices",
    "dispatched_probs",
    "dispatched_indices",
    "dispatched_routing_map",
    "reversed_mapping_for_combine",
)
"""What Megatron's manager of DeepEP keeps of a micro-batch's routing."""


def dispatch_options(model: ModelConfig, layout: LayoutConfig, platform: Platform) -> dict[str, Any]:
    """Megatron's settings of the exchange; the all-to-all for plans, which are made without Transformer Engine."""
    if layout.dispatch == "deepep" and model.moe.experts and platform.transformer_engine:
        return dict(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deepep")
    # Packed micro-batches differ in length; Megatron then requires this dispatcher even for dense models.
    return dict(moe_token_dispatcher_type="alltoall")


def check_dispatch(layout: LayoutConfig, platform: Platform) -> None:
    """Raises ValueError when this process cannot exchange tokens as `layout.dispatch` asks it to."""
    if layout.dispatch != "deepep":
        return
    missing = None
    if not platform.transformer_engine:
        missing = "Transformer Engine on a GPU"
    elif find_spec("deep_ep") is None:
        missing = "the package deep_ep"
    if missing:
        raise ValueError(
            f"layout.dispatch=deepep needs {missing}, and this process has none (tools/doctor.py says more); set "
            "layout.dispatch=alltoall"
        )
