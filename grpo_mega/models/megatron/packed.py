"""How a flat row of tokens splits into sequences, and the keys and values kept of the sequences being generated."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams

HOST = torch.device("cpu")


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
class ContextShard:
    """The rows of a packed row that one context parallel rank holds, and how to compute attention for them.

    Of 2 * size equal parts of the row, a rank holds one from the front and its mirror image from the back: rows near
    the end of a long sequence see more keys, and each rank gets as many of them.

    Attributes:
        rows: [T'] rows held here, ascending.
        gathered: [T] where each row lies when the ranks' rows are put one rank after the other.
        queries: [n] which of the T' rows belong to a sequence.
        cells: [n] where they lie in a table of [N, longest].
        longest: Most rows of one sequence that are held here.
        places: [N, 1, longest, 1] int32 place of each cell's token in its sequence; 0 in cells of no token.
    """

    rows: torch.Tensor
    gathered: torch.Tensor
    queries: torch.Tensor
    cells: torch.Tensor
    longest: int
    places: torch.Tensor

    @classmethod
    def of(cls, packed: PackedTokens, rank: int, size: int) -> ContextShard:
        """The rows of `rank`; T must be a multiple of 2 * size."""
        parts = torch.arange(packed.total, device=packed.rows.device).chunk(2 * size)
        held = [torch.cat([parts[r], parts[2 * size - 1 - r]]) for r in range(size)]
        rows = held[rank]
        queries = (rows < len(packed.owners)).nonzero()[:, 0]
        owners = packed.owners[rows[queries]]
        sequence, positions = packed.sequence[owners], packed.positions[rows[queries]]
        counts = torch.bincount(sequence, minlength=packed.sequences)
        longest = int(counts.max()) if len(counts) else 0
        starts = counts.cumsum(0) - counts
        cells = sequence * longest + torch.arange(len(sequence), device=rows.device) - starts[sequence]
        places = positions.new_zeros(packed.sequences * longest).index_copy_(0, cells, positions).int()
        places = places.view(packed.sequences, 1, longest, 1)
        return cls(rows, torch.cat(held).argsort(), queries, cells, longest, places)

    def seen(self, keys: int) -> torch.Tensor:
        """[N, 1, longest, keys] whether a cell's token sees a key of its sequence: those up to and including itself.

        By far the largest tensor of a micro-batch, up to a gigabyte in the longest: made for each use, never kept.
        """
        return torch.arange(keys, dtype=torch.int32, device=self.places.device) <= self.places

    def to(self, device: torch.device) -> ContextShard:
        """The same on another device."""
        return _moved(self, device)


@dataclass
class PackedTokens(PackedSeqParams):
    """How a flat row of T tokens splits into sequences; what `packed_seq_params` carries through Megatron.

    The tokens that several sequences begin with, such as the prompt of a group, can lie in the row once: what a token
    computes depends on the tokens before it alone. So the N sequences have E tokens in all, and the row U <= E. The
    last T - U tokens of the row belong to no sequence: they make T divisible by the number of ranks that share it.
    With context parallelism a rank holds T' of the T rows, otherwise all of them.

    Attributes:
        positions: [T'] place of each token in its sequence.
        copies: [T'] float32, how many of the E tokens a row stands for; 0 for padding.
        rows: [E] row of every token of every sequence, sequence by sequence.
        owners: [U] which of the E tokens a row stands for; the first of those that share it.
        sequence: [E] number of the sequence each token belongs to.
        table: [N * longest] row that stands in each cell of a table of [N, longest]. Cells behind the end of a sequence
            name some row.
        cells: [U] the cell of the token that a row stands for.
        more_rows, more_cells: [E - U] the rows that further sequences share, and where those have them.
        total: Rows in all, T.
        sequences: Number of sequences, N.
        longest: Most tokens of one sequence.
        cache: Where keys and values are kept while generating.
        decoding: Whether each sequence brings exactly one token, which sees what the cache holds.
        shard: Which rows this rank holds; None for all of them.
        batch_sequences, batch_tokens: Of the whole batch that this is a part of.
        loss_scale: What a loss over the whole batch is multiplied with, because Megatron averages over micro-batches
            and replicas although weights are global already.
        routed: What the router reads of all tokens, once a layer has made it.
        ahead: [depths, T'] the token 1, 2, ... places after each row's, 0 behind the end; for multi-token prediction.
        experts: [T', MoE layers, top k] which experts each row goes to, -1 where its scores choose; None when they
            always do.
        angles: Cosine and sine of the rotary angles of all tokens, once a layer has made them.
    """

    positions: torch.Tensor = None  # type: ignore[assignment]
    rows: torch.Tensor = None  # type: ignore[assignment]
    owners: torch.Tensor = None  # type: ignore[assignment]
    sequence: torch.Tensor = None  # type: ignore[assignment]
    table: torch.Tensor = None  # type: ignore[assignment]
    cells: torch.Tensor = None  # type: ignore[assignment]
    more_rows: torch.Tensor = None  # type: ignore[assignment]
    more_cells: torch.Tensor = None  # type: ignore[assignment]
    copies: torch.Tensor = None  # type: ignore[assignment]
    total: int = 0
    sequences: int = 0
    longest: int = 0
    cache: KVCache | None = None
    decoding: bool = False
    shard: ContextShard | None = None
    batch_sequences: int = 0
    batch_tokens: int = 0
    loss_scale: float = 1.0
    routed: tuple[torch.Tensor, ...] | None = None
    ahead: torch.Tensor | None = None
    experts: torch.Tensor | None = None
    angles: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def of_sequences(
        cls,
        lengths: torch.Tensor,
        multiple: int,
        cache: KVCache | None = None,
        prompts: torch.Tensor | None = None,
        prompt_lengths: torch.Tensor | None = None,
    ) -> PackedTokens:
        """Whole sequences, padded to a multiple of `multiple` tokens.

        Args:
            lengths: [N] tokens of each sequence.
            multiple: T is a multiple of it.
            cache: Where to leave keys and values.
            prompts: [N] sequences of the same number begin with the same tokens; None when nothing is shared.
            prompt_lengths: [N] how many tokens those are.
        """
        longest = int(lengths.max()) if len(lengths) else 0
        sequence = torch.repeat_interleave(lengths)
        starts = lengths.cumsum(0) - lengths
        tokens = torch.arange(len(sequence), device=lengths.device)
        positions = tokens - starts[sequence]
        owner = tokens
        if prompts is not None and prompt_lengths is not None and len(lengths):
            first = (prompts[:, None] == prompts).int().argmax(-1)  # [N] the first sequence with the same prompt
            owner = torch.where(positions < prompt_lengths[sequence], starts[first][sequence] + positions, tokens)
        owners, rows = owner.unique(return_inverse=True)
        cells = sequence * longest + positions
        again = owner != tokens
        return cls._padded(
            positions[owners],
            torch.bincount(rows).float(),
            multiple,
            rows=rows,
            owners=owners,
            sequence=sequence,
            table=rows.new_zeros(len(lengths) * longest).index_copy_(0, cells, rows),
            cells=cells[owners],
            more_rows=rows[again],
            more_cells=cells[again],
            sequences=len(lengths),
            longest=longest,
            cache=cache,
        )

    @classmethod
    def one_each(cls, positions: torch.Tensor, multiple: int, cache: KVCache) -> PackedTokens:
        """A decoding step: one token per cached sequence, at these positions ([N]); the table is that of one column."""
        each = torch.arange(len(positions), device=positions.device)
        return cls._padded(
            positions,
            torch.ones_like(positions, dtype=torch.float32),
            multiple,
            rows=each,
            owners=each,
            sequence=each,
            table=each,
            cells=each,
            more_rows=each[:0],
            more_cells=each[:0],
            sequences=len(positions),
            longest=int(positions.max()) + 1 if len(positions) else 0,
            cache=cache,
            decoding=True,
        )

    @property
    def padding(self) -> int:
        """Tokens at the end of the whole row that belong to no sequence, T - U."""
        return self.total - len(self.owners)

    def sharded(self, rank: int, size: int) -> PackedTokens:
        """The part of a context parallel rank: T' = T / size rows."""
        if size == 1:
            return self
        shard = ContextShard.of(self, rank, size)
        return replace(self, shard=shard, positions=self.positions[shard.rows], copies=self.copies[shard.rows])

    def counted_by(self, ranks: int) -> PackedTokens:
        """The same with Megatron's count of rows when so many context parallel ranks bring a row of their own each."""
        whole = self.cu_seqlens_q * ranks
        return replace(self, **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), whole))

    def to(self, device: torch.device) -> PackedTokens:
        """The same on another device."""
        return _moved(self, device)

    @classmethod
    def _padded(cls, positions: torch.Tensor, copies: torch.Tensor, multiple: int, **others: Any) -> PackedTokens:
        # A batch without a single token still takes part in the collectives of its layout, with padding only.
        padding = -len(positions) % multiple or (0 if len(positions) else multiple)
        positions = F.pad(positions, (0, padding))
        # Megatron applies rotary frequencies that are given per token when it sees one sequence of all tokens.
        whole = torch.tensor([0, len(positions)], dtype=torch.int32, device=HOST)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=whole,
            cu_seqlens_kv=whole,
            max_seqlen_q=len(positions),
            max_seqlen_kv=len(positions),
            positions=positions,
            copies=F.pad(copies, (0, padding)),
            total=len(positions),
            **others,
        )


def _moved(value: Any, device: torch.device) -> Any:
    """A dataclass with its tensors, and those of its shard, on another device.

    Megatron's `cu_seqlens_*` stay where they are: its rotary embedding alone reads them, as Python numbers, and would
    wait for a GPU to bring them back in every layer.
    """
    found = {f.name: getattr(value, f.name) for f in fields(value) if not f.name.startswith("cu_seqlens")}
    return replace(value, **{name: x.to(device) for name, x in found.items() if hasattr(x, "to")})
