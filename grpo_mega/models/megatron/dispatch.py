"""How tokens get to their experts on other GPUs and back: NCCL's all-to-all, or DeepEP's kernels.

How many go where is counted on the GPUs, and the host waits for these numbers before it can start an all-to-all: once
in every layer, whose recomputation for the backward pass finds them in the micro-batch (`RecallingDispatcher`).

A token that goes to several experts of one machine crosses the network once with DeepEP, and with NCCL once for each
expert. Megatron's "flex" dispatcher calls it; its kernels run beside others (`async_finish`).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from grpo_mega.config.schema import LayoutConfig, ModelConfig
from grpo_mega.models.megatron.router import PackedRouter
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
EXCHANGE = (
    "routing_map",
    "input_splits",
    "output_splits",
    "output_splits_tp",
    "num_out_tokens",
    "num_global_tokens_per_local_expert",
)
"""What an all-to-all needs to know of a micro-batch, beside the tokens of each expert here, as Megatron's dispatcher
names it: the experts of each row, and numbers."""


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


class RecallingDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's exchange by all-to-all, which a layer that is recomputed repeats as it was in its forward pass.

    Tokens go to the experts to which they went, and nobody counts them again: no rank gathers the counts of the others,
    and the host waits for none. The router's own choice is the same, unless a kernel did not give the same bits twice;
    then an expert on which the two differ has no part in that token's gradient, and no token gets to another's expert.

    Attributes:
        router: Of the same layer; it has the micro-batch, in which exchanges are kept.
    """

    router: PackedRouter
    _recalls = False

    def preprocess(self, routing_map: torch.Tensor) -> torch.Tensor:
        """Counts the tokens of the exchange, or recalls them; returns those of each expert here, [experts]."""
        kept = self.router.packed.exchanges.pop(self, None) if torch.is_grad_enabled() else None
        self._recalls = kept is not None
        if kept is None:
            return super().preprocess(routing_map)
        for name, value in kept.items():
            setattr(self, name, value)
        return self.tokens_per_expert

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: torch.Tensor | None = None) -> Any:
        if self._recalls:  # all of it is where it is needed
            return tokens_per_expert
        found = super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)
        packed = self.router.packed
        # A layer that is to be recomputed has no gradients in the forward pass of a micro-batch that is learned from.
        if point == "before_finish" and packed.learned and not torch.is_grad_enabled():
            known = {name: vars(self)[name] for name in EXCHANGE if name in vars(self)}
            packed.exchanges[self] = known | {"tokens_per_expert": found}
        return found


def use_recalling_dispatcher(model: torch.nn.Module) -> None:
    """Changes the class of every dispatcher that uses an all-to-all to RecallingDispatcher; after the routers'."""
    for module in model.modules():
        dispatcher: Any = getattr(module, "token_dispatcher", None)
        if type(dispatcher) is MoEAlltoAllTokenDispatcher:
            dispatcher.__class__ = RecallingDispatcher
            dispatcher.router = module.router
