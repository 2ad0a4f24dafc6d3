"""Attention over packed sequences, with and without a key-value cache.

Sequences are concatenated in a flat row of tokens, so that every other layer computes on real tokens only. Here they
are arranged as a table [sequence, position] for torch's fused attention, which needs no mask for right-padded causal
sequences, and the result is packed again; or kernels that take sequences of any length compute them in the row
(`varlen.py`). The embedded engine uses the same module, and always tables: a prompt fills the cache, and a decoding
step is a packed batch of one token per sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from grpo_mega.config.schema import Llama3RopeConfig, YarnConfig
from grpo_mega.models.megatron.packed import ContextShard, PackedTokens, sees
from grpo_mega.models.megatron.rotary import cos_sin, rotate
from grpo_mega.models.megatron.sinks import attend_with_sinks, new_sinks
from grpo_mega.models.megatron.varlen import attend


class _ToTable(torch.autograd.Function):
    """The row of tokens as a table [N * longest]; a token that several sequences share is repeated.

    Cells after the end of a sequence hold an arbitrary token: no real query attends to them, so they have no gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: PackedTokens) -> torch.Tensor:
        ctx.packed = packed
        return x.index_select(0, packed.table)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        packed = ctx.packed
        total = grad.index_select(0, packed.cells)
        if len(packed.more_rows):
            # Summed in float32, because many sequences may share a row.
            more = grad.index_select(0, packed.more_cells).float()
            total = total.float().index_add_(0, packed.more_rows, more).to(grad.dtype)
        return total, None


class _FromTable(torch.autograd.Function):
    """The table [N * longest] back as a row of tokens; a cell is read once, so the gradient is a copy into zeros."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: PackedTokens) -> torch.Tensor:
        ctx.packed, ctx.cells = packed, x.shape[0]
        return x.index_select(0, packed.cells)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.new_zeros(ctx.cells, *grad.shape[1:]).index_copy_(0, ctx.packed.cells, grad.contiguous()), None


class _ScatterRows(torch.autograd.Function):
    """Zeros with rows[index] = x; the index has no duplicates, so the gradient is a plain gather."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.save_for_backward(index)
        return x.new_zeros(rows, *x.shape[1:]).index_copy_(0, index, x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return grad.index_select(0, index), None, None


def _zeros(rows: int, *inputs: torch.Tensor) -> torch.Tensor:
    """[rows, heads, value channels] zeros, for a micro-batch without sequences.

    They depend on every input: Megatron expects a gradient, even if zero, of every parameter in every micro-batch.
    """
    query, _, value, *_ = inputs
    return query.new_zeros(rows, query.shape[1], value.shape[2]) + 0 * torch.stack([x.sum() for x in inputs]).sum()


def _all_rows(x: torch.Tensor, shard: ContextShard) -> torch.Tensor:
    """[T', ...] of every context parallel rank -> [T, ...] in the order of the row; reduce-scatters the gradient."""
    group = parallel_state.get_context_parallel_group()
    gathered = gather_from_sequence_parallel_region(x.contiguous(), tensor_parallel_output_grad=True, group=group)
    return gathered.index_select(0, shard.gathered)


class PackedAttention(MegatronModule):
    """Core attention of a Megatron layer: causal within each packed sequence, grouped-query and latent attention.

    With a `rope_base` it rotates queries and keys first, `rope_fraction` of their channels; those of latent attention
    are already rotated. With a `window` a token sees that many tokens, itself included, except in every layer whose
    number `full_every` divides; layers with a window rotate with `window_rope_base`, if that is given. With `sinks`
    every head has one (`sinks.py`).
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        softmax_scale: float | None = None,
        rope_base: float | None = None,
        llama3_rope: Llama3RopeConfig | None = None,
        rope_fraction: float = 1.0,
        window: int | None = None,
        full_every: int = 0,
        window_rope_base: float | None = None,
        yarn: YarnConfig | None = None,
        sinks: bool = False,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale
        sees_all = window is None or (full_every > 0 and layer_number % full_every == 0)
        self.window = None if sees_all else window
        self.rope_base = rope_base if sees_all or window_rope_base is None else window_rope_base
        self.llama3_rope, self.rope_fraction, self.yarn = llama3_rope, rope_fraction, yarn
        # Named as in Megatron's own attention.
        self.softmax_offset = new_sinks(config) if sinks else None

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
            # Computed by the first layer with this base, for all of them.
            if self.rope_base not in packed.angles:
                channels = round(query.shape[-1] * self.rope_fraction)
                angles = cos_sin(packed.positions, channels, self.rope_base, self.llama3_rope, self.yarn)
                # A new dictionary, because copies of `packed` by `replace` share this one.
                packed.angles = packed.angles | {self.rope_base: angles}
            angles = packed.angles[self.rope_base]
            query, key = rotate(query, *angles), rotate(key, *angles)
        # By kernels, in the row itself; else in tables, of this rank's queries over all keys or of whole sequences.
        if packed.runs is not None:
            key, value = (_all_rows(x, packed.shard) if packed.shard else x for x in (key, value))
            calls = packed.calls_in(self.window)
            return attend(query, key, value, self.softmax_offset, calls, self.softmax_scale).flatten(1)
        if packed.shard is not None:
            return self._shared_context(query, key, value, packed, packed.shard).flatten(1)
        tokens = query.shape[0] - packed.padding
        out = (self._decode if packed.decoding else self._causal)(query[:tokens], key[:tokens], value[:tokens], packed)
        return F.pad(out.flatten(1), (0, 0, 0, packed.padding)) if packed.padding else out.flatten(1)

    def _shared_context(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedTokens, shard: ContextShard
    ) -> torch.Tensor:
        """Attention of this rank's queries over the keys of all ranks; [T', heads, value channels]."""
        # Rows of no sequence come last, and no cell of the table refers to them.
        key, value = (_all_rows(x, shard)[: len(packed.owners)] for x in (key, value))
        n, rows = packed.sequences, len(query)
        if n == 0:
            return _zeros(rows, query, key, value, *self.parameters())
        k, v = (_ToTable.apply(x, packed).unflatten(0, (n, packed.longest)).transpose(1, 2) for x in (key, value))
        # A rank holds only some rows of each sequence, so its queries fill a narrower table than the keys; results of
        # cells that they leave empty are not read.
        q = _ScatterRows.apply(query.index_select(0, shard.queries), shard.cells, n * shard.longest)
        q = q.unflatten(0, (n, shard.longest)).transpose(1, 2)
        out = self._attend(q, k, v, shard.seen(packed.longest, self.window))
        out = out.transpose(1, 2).flatten(0, 1).index_select(0, shard.cells)
        return _ScatterRows.apply(out, shard.queries, rows)

    def _causal(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedTokens
    ) -> torch.Tensor:
        n, longest = packed.sequences, packed.longest
        if n == 0:
            return _zeros(0, query, key, value, *self.parameters())
        # [N * longest, heads, channels] -> [N, heads, longest, channels]
        q, k, v = (_ToTable.apply(x, packed).unflatten(0, (n, longest)).transpose(1, 2) for x in (query, key, value))
        if packed.cache is not None:
            for store, x in ((packed.cache.keys, k), (packed.cache.values, v)):
                store[self.layer_number] = x.new_zeros(*x.shape[:2], packed.cache.capacity, x.shape[3])
                store[self.layer_number][:, :, : x.shape[2]] = x
        seen = None
        if self.window is not None and self.window < longest:  # [longest, longest], the same for every sequence
            positions = torch.arange(longest, device=q.device)
            seen = sees(positions[:, None], positions, self.window)
        out = self._attend(q, k, v, seen)
        return _FromTable.apply(out.transpose(1, 2).flatten(0, 1), packed)

    def _decode(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedTokens
    ) -> torch.Tensor:
        assert packed.cache is not None
        if packed.sequences == 0:
            return query.new_zeros(0, query.shape[1], value.shape[2])
        keys, values = packed.cache.keys[self.layer_number], packed.cache.values[self.layer_number]
        positions = packed.positions[: packed.sequences]
        # Indices on both sides of a slice put their axis first: [N, heads, channels], the shape of `key`.
        keys[packed.rows, :, positions] = key
        values[packed.rows, :, positions] = value
        k, v = (x[:, :, : packed.longest] for x in (keys, values))
        # [N, 1, 1, longest]
        seen = sees(positions[:, None, None, None], torch.arange(packed.longest, device=query.device), self.window)
        return self._attend(query[:, :, None], k, v, seen)[:, :, 0]

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor | None
    ) -> torch.Tensor:
        """Queries [N, heads, Q, d] over keys and values [N, kv heads, K, ...]; without a mask `seen` it is causal."""
        # Grouped heads are left to torch only where it has a kernel for them; otherwise keys and values are repeated.
        grouped = self.softmax_offset is None and seen is None and _flash_takes_groups(query, key, value)
        if not grouped:
            key, value = _repeat_heads(key, query.shape[1]), _repeat_heads(value, query.shape[1])
        if self.softmax_offset is not None:
            return attend_with_sinks(query, key, value, seen, self.softmax_offset, self.softmax_scale)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, is_causal=seen is None, scale=self.softmax_scale, enable_gqa=grouped
        )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The sinks, if there are any, split by heads."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )


def _flash_takes_groups(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether torch computes causal attention of grouped heads by FlashAttention, which needs no copies of keys.

    That takes no mask, half precision, and values as wide as keys. The fused kernel that takes the others (asked by
    `can_use_efficient_attention` of torch 2.11) takes no groups: torch would compute them without any, all logits in
    memory. So what is not for FlashAttention gets copies.
    """
    if not query.is_cuda or query.shape[1] == key.shape[1]:
        return False
    return can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, True, True))


def _repeat_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[N, kv heads, L, d] -> [N, heads, L, d]: every key-value head serves heads / kv heads queries."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
