"""Attention over packed sequences, with and without a key-value cache.

Sequences lie one after the other in a flat row of tokens, so that every other layer computes on real tokens only.
Here they are laid out as [sequence, position] for torch's fused attention, which needs no mask for right-padded
causal rows, and packed again. The same module serves the embedded engine: a prompt fills the cache, and a decoding
step is a packed batch of one token per sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule

from grpo_mega.policy.packed import KVCache, PackedTokens
from grpo_mega.policy.rotary import cos_sin, rotate


class _Scatter(torch.autograd.Function):
    """rows[index] = x into zeros; the index has no duplicates, so the gradient is a plain gather."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.save_for_backward(index)
        return x.new_zeros(rows, *x.shape[1:]).index_copy_(0, index, x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return grad.index_select(0, index), None, None


class _Gather(torch.autograd.Function):
    """x[index]; the index has no duplicates, so the gradient is a copy where autograd's own would accumulate."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.rows = x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, index, grad.contiguous()), None


class PackedAttention(MegatronModule):
    """Core attention of a Megatron layer: causal within each packed sequence, grouped-query and latent attention.

    With a `rope_base` it rotates queries and keys first; latent attention brings them rotated.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        softmax_scale: float | None = None,
        rope_base: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale
        self.rope_base = rope_base

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: PackedTokens | None = None,
    ) -> torch.Tensor:
        """query [T, heads, channels], key and value [T, kv heads, channels] -> [T, heads * value channels]."""
        if not isinstance(packed_seq_params, PackedTokens):
            raise TypeError("packed_seq_params must be PackedTokens; call the model through Policy")
        packed = packed_seq_params
        if self.rope_base is not None:
            if packed.angles is None:  # the same in every layer
                packed.angles = cos_sin(packed.positions, query.shape[-1], self.rope_base)
            query, key = rotate(query, *packed.angles), rotate(key, *packed.angles)
        tokens = query.shape[0] - packed.padding
        out = (self._decode if packed.decoding else self._causal)(query[:tokens], key[:tokens], value[:tokens], packed)
        return F.pad(out.flatten(1), (0, 0, 0, packed.padding)) if packed.padding else out.flatten(1)

    def _causal(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedTokens
    ) -> torch.Tensor:
        n, longest = packed.sequences, packed.longest
        if n == 0:
            return query.new_zeros(0, query.shape[1], value.shape[2])
        index = packed.sequence * longest + packed.positions[: len(packed.sequence)]
        # [N * longest, heads, channels] -> [N, heads, longest, channels]
        q, k, v = (_Scatter.apply(x, index, n * longest).unflatten(0, (n, longest)).transpose(1, 2)
                   for x in (query, key, value))  # fmt: skip
        if packed.cache is not None:
            self._fill(packed.cache, k, v)
        k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale)
        return _Gather.apply(out.transpose(1, 2).flatten(0, 1), index)

    def _fill(self, cache: KVCache, key: torch.Tensor, value: torch.Tensor) -> None:
        for store, x in ((cache.keys, key), (cache.values, value)):
            store[self.layer_number] = x.new_zeros(*x.shape[:2], cache.capacity, x.shape[3])
            store[self.layer_number][:, :, : x.shape[2]] = x

    def _decode(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedTokens
    ) -> torch.Tensor:
        assert packed.cache is not None
        if packed.sequences == 0:
            return query.new_zeros(0, query.shape[1], value.shape[2])
        keys, values = packed.cache.keys[self.layer_number], packed.cache.values[self.layer_number]
        positions = packed.positions[: packed.sequences]
        keys[packed.sequence, :, positions] = key
        values[packed.sequence, :, positions] = value
        k, v = (_repeat_heads(x[:, :, : packed.longest], query.shape[1]) for x in (keys, values))
        # [N, 1, 1, longest]: a token sees its sequence up to and including itself
        seen = torch.arange(packed.longest, device=query.device) <= positions[:, None, None, None]
        out = F.scaled_dot_product_attention(query[:, :, None], k, v, attn_mask=seen, scale=self.softmax_scale)
        return out[:, :, 0]


def _repeat_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[N, kv heads, L, d] -> [N, heads, L, d]: every key-value head serves heads / kv heads queries."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
