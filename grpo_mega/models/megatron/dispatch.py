"""Sends tokens to their experts on other GPUs and back: by NCCL's all-to-all, or by DeepEP's kernels.

The GPUs count how many tokens go where, and the host waits for these numbers before it can start an all-to-all. It
waits once in every layer: recomputation for the backward pass takes the numbers from the micro-batch
(`RecallingDispatcher`).

A token that goes to several experts of one machine crosses the network once with DeepEP, and with NCCL once for each
expert. Megatron's "flex" dispatcher calls DeepEP, whose kernels overlap with others (`async_finish`).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from grpo_mega.config.schema import LayoutConfig, ModelConfig
from grpo_mega.errors import InputError
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
"""Attributes in which Megatron's manager of DeepEP keeps a micro-batch's routing."""
EXCHANGE = (
    "routing_map",
    "input_splits",
    "output_splits",
    "output_splits_tp",
    "num_out_tokens",
    "num_global_tokens_per_local_expert",
)
"""Attributes of Megatron's dispatcher that an all-to-all needs, in addition to the number of tokens of each local
expert: the experts of each row, and counts."""


def dispatch_options(model: ModelConfig, layout: LayoutConfig, platform: Platform) -> dict[str, Any]:
    """Megatron's settings of the dispatcher; plans, which are made without Transformer Engine, have the all-to-all."""
    if layout.dispatch == "deepep" and model.moe.experts and platform.transformer_engine:
        return dict(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deepep")
    # Packed micro-batches differ in length; Megatron then requires this dispatcher even for dense models.
    return dict(moe_token_dispatcher_type="alltoall")


def check_dispatch(layout: LayoutConfig, platform: Platform) -> None:
    """Raises InputError when this process cannot exchange tokens by `layout.dispatch`."""
    if layout.dispatch != "deepep":
        return
    missing = None
    if not platform.transformer_engine:
        missing = "Transformer Engine on a GPU"
    elif find_spec("deep_ep") is None:
        missing = "the package deep_ep"
    if missing:
        what = f"needs {missing}, which this process lacks (tools/doctor.py says more)"
        raise InputError("layout.dispatch=deepep", what, "set layout.dispatch=alltoall")


class RecallingDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's all-to-all dispatcher, which repeats the exchange of the forward pass when a layer is recomputed.

    Tokens go to the same experts as before, and are not counted again: no rank gathers the counts of the others, and
    the host does not wait. The recomputed router chooses the same experts, unless a kernel does not give the same bits
    twice; then an expert on which the two choices differ has no part in that token's gradient.

    Attributes:
        router: Router of the same layer; it has the micro-batch, in which exchanges are kept.
    """

    router: PackedRouter
    _recalls = False

    def preprocess(self, routing_map: torch.Tensor) -> torch.Tensor:
        """Counts the tokens of the exchange, or recalls the counts; returns those of each local expert, [experts]."""
        # A recomputed layer runs first without gradients, when the exchange is kept, and then with them.
        kept = self.router.packed.exchanges.pop(self, None) if torch.is_grad_enabled() else None
        self._recalls = kept is not None
        if kept is None:
            return super().preprocess(routing_map)
        for name, value in kept.items():
            setattr(self, name, value)
        return self.tokens_per_expert

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: torch.Tensor | None = None) -> Any:
        # Recalled counts are on the host already: nothing to copy, nothing to wait for.
        if self._recalls:
            return tokens_per_expert
        found = super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)
        packed = self.router.packed
        # In the forward pass of a micro-batch with a backward pass, a layer without gradients will be recomputed. Only
        # at the last point are all numbers on the host.
        if point == "before_finish" and packed.learned and not torch.is_grad_enabled():
            known = {name: vars(self)[name] for name in EXCHANGE if name in vars(self)}
            packed.exchanges[self] = known | {"tokens_per_expert": found}
        return found


def use_recalling_dispatcher(model: torch.nn.Module) -> None:
    """Changes the class of every all-to-all dispatcher to RecallingDispatcher; call it after the routers' change."""
    for module in model.modules():
        dispatcher: Any = getattr(module, "token_dispatcher", None)
        if type(dispatcher) is MoEAlltoAllTokenDispatcher:
            dispatcher.__class__ = RecallingDispatcher
            dispatcher.router = module.router
