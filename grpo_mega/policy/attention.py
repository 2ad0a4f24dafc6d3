"""Attention over packed sequences, with and without a key-value cache.

Sequences lie one after the other in a flat row of tokens, so that every other layer computes on real tokens only.
Here they are laid out as [sequence, position] for torch's fused attention, which needs no mask for right-padded
causal rows, and packed again. The same module serves the embedded engine: a prompt fills the cache, and a decoding
step is a packed batch of one token per sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule


@dataclass
class KVCache:
    """Keys and values of the sequences being generated, per layer of this pipeline stage.

    Attributes:
        capacity: Longest sequence.
        keys: layer number -> [N, heads, capacity, channels].
        values: layer number -> [N, heads, capacity, channels].
    """

    capacity: int
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)

    def keep(self, rows: torch.Tensor) -> None:
        """Keeps (and repeats, when a row is named twice) only these sequences, in this order."""
        for store in (self.keys, self.values):
            for layer in store:
                store[layer] = store[layer].index_select(0, rows)


@dataclass
class PackedTokens(PackedSeqParams):
    """How a flat row of T tokens splits into sequences; what `packed_seq_params` carries through Megatron.

    The last `padding` tokens belong to no sequence: they make T divisible by the tensor parallel size.

    Attributes:
        positions: [T] place of each token in its sequence.
        sequence: [T - padding] sequence each token belongs to, ascending.
        sequences: Number of sequences, N.
        longest: Most tokens of one sequence.
        cache: Where keys and values are kept while generating.
        decoding: Whether each sequence brings exactly one token, which sees what the cache holds.
    """

    positions: torch.Tensor = None  # type: ignore[assignment]
    sequence: torch.Tensor = None  # type: ignore[assignment]
    sequences: int = 0
    longest: int = 0
    padding: int = 0
    cache: KVCache | None = None
    decoding: bool = False

    @classmethod
    def of_lengths(cls, lengths: torch.Tensor, multiple: int, cache: KVCache | None = None) -> PackedTokens:
        """Whole sequences of these lengths ([N]), padded to a multiple of `multiple` tokens."""
        tokens, longest = int(lengths.sum()), int(lengths.max()) if len(lengths) else 0
        sequence = torch.repeat_interleave(lengths)
        starts = lengths.cumsum(0) - lengths
        positions = torch.arange(tokens, device=lengths.device) - starts[sequence]
        return cls._make(positions, sequence, len(lengths), longest, multiple, cache, decoding=False)

    @classmethod
    def one_each(cls, positions: torch.Tensor, multiple: int, cache: KVCache) -> PackedTokens:
        """A decoding step: one token per cached sequence, at these positions ([N])."""
        sequence = torch.arange(len(positions), device=positions.device)
        longest = int(positions.max()) + 1 if len(positions) else 0
        return cls._make(positions, sequence, len(positions), longest, multiple, cache, decoding=True)

    def to(self, device: torch.device) -> PackedTokens:
        """The same on another device."""
        moved = ("positions", "sequence", "cu_seqlens_q", "cu_seqlens_kv")
        return replace(self, **{name: getattr(self, name).to(device) for name in moved})

    @classmethod
    def _make(
        cls,
        positions: torch.Tensor,
        sequence: torch.Tensor,
        sequences: int,
        longest: int,
        multiple: int,
        cache: KVCache | None,
        decoding: bool,
    ) -> PackedTokens:
        # A batch without a single token still takes part in the collectives of its layout, with padding only.
        padding = -len(positions) % multiple or (0 if len(positions) else multiple)
        positions = F.pad(positions, (0, padding))
        # Megatron applies rotary frequencies that are given per token when it sees one sequence of all T tokens.
        whole = torch.tensor([0, len(positions)], dtype=torch.int32, device=positions.device)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=whole,
            cu_seqlens_kv=whole,
            max_seqlen_q=len(positions),
            max_seqlen_kv=len(positions),
            positions=positions,
            sequence=sequence,
            sequences=sequences,
            longest=longest,
            padding=padding,
            cache=cache,
            decoding=decoding,
        )


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
    """Core attention of a Megatron layer: causal within each packed sequence, grouped-query and latent attention."""

    def __init__(self, config: Any, layer_number: int, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale

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
