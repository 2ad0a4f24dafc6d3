"""Megatron's router on packed tokens: what balances the experts counts every token of every sequence, and nothing else.

Padding rows belong to no sequence, and a row that several sequences share stands for a token of each. Counted so, the
balancing does not depend on the layout, nor on how the batch is cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer

from grpo_mega.policy.packed import PackedTokens


class PackedRouter(TopKRouter):
    """Top-k routing with an expert bias (DeepSeek-V3, section 2.1.2)."""

    packed: PackedTokens

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: Any = None) -> None:
        """Adds up tokens per expert; `routing_map` is [rows of this rank, experts]."""
        if self.enable_expert_bias and torch.is_grad_enabled():  # not while sampling or scoring
            self.local_tokens_per_expert += self._local_copies() @ routing_map.float()

    def _local_copies(self) -> torch.Tensor:
        """[rows of this rank] how many tokens each row stands for."""
        copies = self.packed.copies
        if not self.config.sequence_parallel:
            return copies
        return copies.chunk(parallel_state.get_tensor_model_parallel_world_size())[
            parallel_state.get_tensor_model_parallel_rank()
        ]


def use_packed_router(model: torch.nn.Module) -> None:
    """Swaps the class of every router, and tells it before each forward pass which tokens it sees."""
    modules: Iterable[Any] = model.modules()
    for module in modules:
        router = getattr(getattr(module, "mlp", None), "router", None)
        if isinstance(module, TransformerLayer) and type(router) is TopKRouter:
            router.__class__ = PackedRouter
            module.register_forward_pre_hook(_tell_router, with_kwargs=True)


def _tell_router(layer: Any, _: Any, arguments: dict[str, Any]) -> None:
    layer.mlp.router.packed = arguments["packed_seq_params"]
