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
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule

from grpo_mega.models.megatron.packed import ContextShard, KVCache, PackedTokens
from grpo_mega.models.megatron.rotary import cos_sin, rotate


class _Spread(torch.autograd.Function):
    """The row of tokens as a table [N * longest]; a token that several sequences share is repeated.

    Cells behind the end of a sequence hold some token: no query that counts sees them, so no gradient comes back.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: PackedTokens) -> torch.Tensor:
        ctx.packed = packed
        return x.index_select(0, packed.table)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        packed = ctx.packed
        total = grad.index_select(0, packed.cells)
        if len(packed.more_rows):  # summed in float32, however many sequences share a row
            more = grad.index_select(0, packed.more_cells).float()
            total = total.float().index_add_(0, packed.more_rows, more).to(grad.dtype)
        return total, None


class _Collect(torch.autograd.Function):
    """From the table back to the row of tokens; a cell is read once, so the gradient is a copy into zeros."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: PackedTokens) -> torch.Tensor:
        ctx.packed, ctx.cells = packed, x.shape[0]
        return x.index_select(0, packed.cells)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.new_zeros(ctx.cells, *grad.shape[1:]).index_copy_(0, ctx.packed.cells, grad.contiguous()), None


class _Place(torch.autograd.Function):
    """rows[index] = x into zeros; the index has no duplicates, so the gradient is a plain gather."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.save_for_backward(index)
        return x.new_zeros(rows, *x.shape[1:]).index_copy_(0, index, x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return grad.index_select(0, index), None, None


def _zeros(rows: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """[rows, heads, value channels] where there is no sequence.

    They depend on every input: Megatron counts on a gradient, if only zeros, for every parameter of every micro-batch.
    """
    return query.new_zeros(rows, query.shape[1], value.shape[2]) + 0 * (query.sum() + key.sum() + value.sum())


def _all_rows(x: torch.Tensor, shard: ContextShard) -> torch.Tensor:
    """[T', ...] of every context parallel rank -> [T, ...] in the order of the row; the gradient is summed and cut."""
    group = parallel_state.get_context_parallel_group()
    gathered = gather_from_sequence_parallel_region(x.contiguous(), tensor_parallel_output_grad=True, group=group)
    return gathered.index_select(0, shard.gathered)


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
        if packed.shard is not None:
            return self._shared_context(query, key, value, packed, packed.shard).flatten(1)
        tokens = query.shape[0] - packed.padding
        out = (self._decode if packed.decoding else self._causal)(query[:tokens], key[:tokens], value[:tokens], packed)
        return F.pad(out.flatten(1), (0, 0, 0, packed.padding)) if packed.padding else out.flatten(1)

    def _shared_context(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedTokens, shard: ContextShard
    ) -> torch.Tensor:
        """Queries of this rank's rows over the keys of all ranks; [T', heads, value channels]."""
        key, value = (_all_rows(x, shard)[: len(packed.owners)] for x in (key, value))
        n, rows = packed.sequences, len(query)
        if n == 0:
            return _zeros(rows, query, key, value)
        k, v = (_Spread.apply(x, packed).unflatten(0, (n, packed.longest)).transpose(1, 2) for x in (key, value))
        q = _Place.apply(query.index_select(0, shard.queries), shard.cells, n * shard.longest)
        q = q.unflatten(0, (n, shard.longest)).transpose(1, 2)
        k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=shard.seen(packed.longest), scale=self.softmax_scale)
        out = out.transpose(1, 2).flatten(0, 1).index_select(0, shard.cells)
        return _Place.apply(out, shard.queries, rows)

    def _causal(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedTokens
    ) -> torch.Tensor:
        n, longest = packed.sequences, packed.longest
        if n == 0:
            return _zeros(0, query, key, value)
        # [N * longest, heads, channels] -> [N, heads, longest, channels]
        q, k, v = (_Spread.apply(x, packed).unflatten(0, (n, longest)).transpose(1, 2) for x in (query, key, value))
        if packed.cache is not None:
            self._fill(packed.cache, k, v)
        k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale)
        return _Collect.apply(out.transpose(1, 2).flatten(0, 1), packed)

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
        keys[packed.rows, :, positions] = key
        values[packed.rows, :, positions] = value
        k, v = (_repeat_heads(x[:, :, : packed.longest], query.shape[1]) for x in (keys, values))
        # [N, 1, 1, longest]: a token sees its sequence up to and including itself
        seen = torch.arange(packed.longest, device=query.device) <= positions[:, None, None, None]
        out = F.scaled_dot_product_attention(query[:, :, None], k, v, attn_mask=seen, scale=self.softmax_scale)
        return out[:, :, 0]


def _repeat_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[N, kv heads, L, d] -> [N, heads, L, d]: every key-value head serves heads / kv heads queries."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
