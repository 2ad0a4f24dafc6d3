"""How a flat row of tokens splits into sequences, and the keys and values kept of the sequences being generated."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams


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
        angles: Cosine and sine of the rotary angles of all tokens, once a layer has made them.
    """

    positions: torch.Tensor = None  # type: ignore[assignment]
    sequence: torch.Tensor = None  # type: ignore[assignment]
    sequences: int = 0
    longest: int = 0
    padding: int = 0
    cache: KVCache | None = None
    decoding: bool = False
    angles: tuple[torch.Tensor, torch.Tensor] | None = None

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
