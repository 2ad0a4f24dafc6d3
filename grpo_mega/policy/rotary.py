"""Rotary frequencies for packed tokens: gathered at each token's own position, so that no layer loops over sequences.

Megatron hands `get_rotary_seq_len`'s result to `forward`; these classes pass the positions along that way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from grpo_mega.policy.attention import PackedTokens


class PackedRotaryEmbedding(RotaryEmbedding):
    """RoPE (Su et al., 2021) whose rows follow `PackedTokens.positions`."""

    table: torch.Tensor

    def get_rotary_seq_len(self, inference_context: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[T] positions, found among Megatron's arguments."""
        packed = next(x for x in (*args, *kwargs.values()) if isinstance(x, PackedTokens))
        return packed.positions

    def forward(self, positions: torch.Tensor, **_: Any) -> torch.Tensor:
        """[T] positions -> [T, 1, 1, channels] angles."""
        return self.table.index_select(0, positions)


def use_packed_rotary(model: torch.nn.Module, context: int) -> None:
    """Makes every rotary embedding of the model read packed positions below `context`."""
    modules: Iterable[Any] = model.modules()
    for module in modules:
        if type(module) is RotaryEmbedding:
            table = module.get_emb(context)
            module.__class__ = PackedRotaryEmbedding
            module.table = table
