"""Packed sequences in a flat row of tokens, and the key-value cache of the sequences being generated."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams

from grpo_mega.models.megatron.runs import AttentionCall, RowRun, calls_of, in_runs
from grpo_mega.models.transfer import moved

HOST = torch.device("cpu")


@dataclass
class KVCache:
    """Keys and values of the sequences being generated, per layer of this pipeline stage.

    Attributes:
        capacity: Tokens of the longest sequence that fits.
        keys: layer number -> [N, heads, capacity, channels].
        values: layer number -> [N, heads, capacity, channels].
    """

    capacity: int
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)

    def keep(self, rows: torch.Tensor) -> None:
        """Selects the sequences of these rows, in this order; a row that occurs twice is repeated."""
        for store in (self.keys, self.values):
            for layer in store:
                store[layer] = store[layer].index_select(0, rows)


@dataclass
class ContextShard:
    """The part of the packed row that one context parallel rank holds, and how to compute attention for it.

    Of 2 * size equal parts of the row, a rank holds one from the front and its mirror image from the back: rows near
    the end of a long sequence attend to more keys, and so each rank has equally many of them.

    Attributes:
        rows: [T'] rows that this rank holds, ascending.
        gathered: [T] index of each row in the concatenation of all ranks' rows.
        stretches: The rows held here, as two stretches [start, end).

    Used only by attention in tables:
        queries: [n] which of the T' rows belong to a sequence.
        cells: [n] cells of the queries in a table of [N, longest].
        longest: Largest number of rows of one sequence that this rank holds.
        positions: [N, 1, longest, 1] int32 position of each cell's token in its sequence; 0 in cells without a token.
    """

    rows: torch.Tensor
    gathered: torch.Tensor
    stretches: tuple[tuple[int, int], ...]
    queries: torch.Tensor = None  # type: ignore[assignment]
    cells: torch.Tensor = None  # type: ignore[assignment]
    longest: int = 0
    positions: torch.Tensor = None  # type: ignore[assignment]

    @classmethod
    def of(cls, packed: PackedTokens, rank: int, size: int) -> ContextShard:
        """The rows of `rank`; T must be a multiple of 2 * size."""
        parts = torch.arange(packed.total, device=packed.rows.device).chunk(2 * size)
        mine = parts[rank], parts[2 * size - 1 - rank]
        held = [torch.cat([parts[r], parts[2 * size - 1 - r]]) for r in range(size)]
        # `argsort` inverts the permutation: it maps each row to its place in the concatenation.
        rows, gathered = held[rank], torch.cat(held).argsort()
        stretches = tuple((int(part[0]), int(part[-1]) + 1) for part in mine)
        if packed.runs is not None:
            return cls(rows, gathered, stretches)
        queries = (rows < len(packed.owners)).nonzero()[:, 0]
        owners = packed.owners[rows[queries]]
        sequence, positions = packed.sequence[owners], packed.positions[rows[queries]]
        counts = torch.bincount(sequence, minlength=packed.sequences)
        longest = int(counts.max()) if len(counts) else 0
        starts = counts.cumsum(0) - counts
        cells = sequence * longest + torch.arange(len(sequence), device=rows.device) - starts[sequence]
        table = positions.new_zeros(packed.sequences * longest).index_copy_(0, cells, positions).int()
        table = table.view(packed.sequences, 1, longest, 1)
        return cls(rows, gathered, stretches, queries, cells, longest, table)

    def seen(self, keys: int, window: int | None) -> torch.Tensor:
        """[N, 1, longest, keys] whether a cell's token attends to a key of its sequence, see `sees`.

        This is by far the largest tensor of a micro-batch, up to a gigabyte: made for each use, never kept.
        """
        return sees(self.positions, torch.arange(keys, dtype=torch.int32, device=self.positions.device), window)

    def to(self, device: torch.device) -> ContextShard:
        """The shard with its tensors on another device."""
        return _moved(self, device)


@dataclass
class PackedTokens(PackedSeqParams):
    """Describes how a flat row of T tokens splits into sequences; Megatron passes it on as `packed_seq_params`.

    A token of the row is also called a row: it is a row of the hidden states. The tokens that several sequences begin
    with, such as the prompt of a group, can be in the row once, because hidden states depend only on earlier tokens.
    So the N sequences have E tokens in all, and the row has U <= E of them. The last T - U tokens of the row belong to
    no sequence: they make T divisible by the number of ranks that share it. With context parallelism a rank holds T' of
    the T rows, otherwise all of them.

    Megatron's own fields `cu_seqlens_q` and `cu_seqlens_kv` are [0, T], as if the row were one sequence.

    Attention is computed in a table of [N, longest], or by kernels that take sequences of any length; these use `runs`
    and no attribute of the table.

    Attributes:
        positions: [T'] position of each token in its sequence.
        copies: [T'] float32, number of the E tokens that a row stands for; 0 for padding.
        rows: [E] row of every token of every sequence, sequence by sequence.
        owners: [U] the first of the E tokens that a row stands for.
        sequence: [E] index of the sequence that each token belongs to.
        table: [N * longest] row of each cell of a table of [N, longest]. Cells after the end of a sequence refer to an
            arbitrary row.
        cells: [U] cell of the token `owners` of each row.
        more_rows, more_cells: [E - U] rows and cells of the tokens that are not `owners` of their row.
        runs: The runs of which the row is a concatenation, see runs.py; None for attention in a table.
        calls: {window: calls of the kernels in layers with this window}, once a layer has made them.
        total: Number of rows, T.
        sequences: Number of sequences, N.
        longest: Number of tokens of the longest sequence.
        cache: Keys and values, while generating.
        decoding: Whether each sequence has exactly one token here, which attends to the cache.
        shard: The rows that this rank holds; None for all of them.
        batch_sequences, batch_tokens: Number of sequences and tokens of the whole batch that this is a part of.
        loss_scale: Factor of a loss over the whole batch: it undoes Megatron's averages over micro-batches and
            replicas, because token weights are already global.
        routed: Tokens as the router needs them, once a layer has computed them; see `_local_tokens` in router.py.
        ahead: [depths, T'] the token 1, 2, ... positions after each row's, 0 after the end; for multi-token prediction.
        experts: [T', MoE layers, top k] which experts each row goes to, -1 where the router's scores choose; None when
            they always do.
        angles: {base of the frequencies: cosine and sine of all tokens' rotary angles}, once a layer has computed them.
        learned: Whether a backward pass follows, for which layers may be computed a second time.
        exchanges: {dispatcher of a layer that will be recomputed: its exchange of tokens}, see dispatch.py.
    """

    # None only formally: the fields of Megatron's dataclass have defaults, and none without may follow them.
    positions: torch.Tensor = None  # type: ignore[assignment]
    rows: torch.Tensor = None  # type: ignore[assignment]
    owners: torch.Tensor = None  # type: ignore[assignment]
    sequence: torch.Tensor = None  # type: ignore[assignment]
    table: torch.Tensor = None  # type: ignore[assignment]
    cells: torch.Tensor = None  # type: ignore[assignment]
    more_rows: torch.Tensor = None  # type: ignore[assignment]
    more_cells: torch.Tensor = None  # type: ignore[assignment]
    copies: torch.Tensor = None  # type: ignore[assignment]
    runs: list[RowRun] | None = None
    calls: dict[int | None, list[AttentionCall]] = field(default_factory=dict)
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
    angles: dict[float, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    learned: bool = False
    exchanges: dict[object, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of_sequences(
        cls,
        lengths: torch.Tensor,
        multiple: int,
        cache: KVCache | None = None,
        prompts: torch.Tensor | None = None,
        prompt_lengths: torch.Tensor | None = None,
        table: bool = True,
    ) -> PackedTokens:
        """Packs whole sequences, padded to a multiple of `multiple` tokens.

        Args:
            lengths: [N] tokens of each sequence.
            multiple: T is a multiple of it.
            cache: Where to store keys and values.
            prompts: [N] number of each sequence's prompt: sequences with the same number begin with the same tokens;
                None when nothing is shared.
            prompt_lengths: [N] number of tokens that those sequences share.
            table: Whether attention is computed in a table; otherwise the row is in runs.
        """
        longest = int(lengths.max()) if len(lengths) else 0
        sequence = torch.repeat_interleave(lengths)
        starts = lengths.cumsum(0) - lengths
        tokens = torch.arange(len(sequence), device=lengths.device)
        positions = tokens - starts[sequence]
        # The owner of a token is the same token in the first sequence with its prompt; tokens with one owner share a
        # row.
        owner, first, branches = tokens, torch.arange(len(lengths)), torch.zeros_like(lengths)
        if prompts is not None and prompt_lengths is not None and len(lengths):
            first = (prompts[:, None] == prompts).int().argmax(-1)  # [N] the first sequence with the same prompt
            owner = torch.where(positions < prompt_lengths[sequence], starts[first][sequence] + positions, tokens)
            # [N] tokens of each sequence after the prompt that it shares with another; 0 if it shares none.
            shared = (first.bincount(minlength=len(first)) > 1)[first] & (prompt_lengths > 0)
            branches = torch.where(shared, lengths - prompt_lengths, 0)
        # Sorted by token, so without runs the rows keep the order of the sequences.
        owners, rows = owner.unique(return_inverse=True)
        of_all = {"sequence": sequence, "sequences": len(lengths), "longest": longest, "cache": cache}
        # Kernels need rows sorted into runs.
        if not table:
            order, runs = in_runs(sequence[owners], branches, first)
            # Row i becomes row `order.argsort()[i]`.
            owners, rows = owners[order], order.argsort()[rows]
            return cls._padded(
                positions[owners], _copies(rows), multiple, rows=rows, owners=owners, runs=runs, **of_all
            )
        # Tables need a cell for each token, and the cells of tokens that share the row of another.
        cells = sequence * longest + positions
        repeated = owner != tokens
        return cls._padded(
            positions[owners],
            _copies(rows),
            multiple,
            rows=rows,
            owners=owners,
            table=rows.new_zeros(len(lengths) * longest).index_copy_(0, cells, rows),
            cells=cells[owners],
            more_rows=rows[repeated],
            more_cells=cells[repeated],
            **of_all,
        )

    @classmethod
    def one_each(cls, positions: torch.Tensor, multiple: int, cache: KVCache) -> PackedTokens:
        """Packs a decoding step: one token per cached sequence, at these positions ([N]); the table has one column."""
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
        """Number of tokens at the end of the whole row that belong to no sequence, T - U."""
        return self.total - len(self.owners)

    def sharded(self, rank: int, size: int) -> PackedTokens:
        """Returns the part of a context parallel rank: T' = T / size rows."""
        if size == 1:
            return self
        shard = ContextShard.of(self, rank, size)
        positions, copies = self.positions[shard.rows], self.copies[shard.rows]
        # Calls are for particular rows, so those of the whole row are not taken over.
        return replace(self, shard=shard, positions=positions, copies=copies, calls={})

    def calls_in(self, window: int | None) -> list[AttentionCall]:
        """The kernels' calls for this rank's rows, in layers with this window; made once, on the device of the rows."""
        assert self.runs is not None
        window = None if window is None or window >= self.longest else window
        if window not in self.calls:
            stretches = self.shard.stretches if self.shard else [(0, self.total)]
            calls = [call.to(self.positions.device) for call in calls_of(self.runs, stretches, window)]
            # A new dictionary, because copies by `replace` share the old one and may have other rows.
            self.calls = self.calls | {window: calls}
        return self.calls[window]

    def counted_by(self, ranks: int) -> PackedTokens:
        """A copy whose row count for Megatron is that of `ranks` context parallel ranks with different rows each."""
        whole = self.cu_seqlens_q * ranks
        return replace(self, **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), whole))

    def to(self, device: torch.device) -> PackedTokens:
        """A copy with its tensors on another device."""
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


def _copies(rows: torch.Tensor) -> torch.Tensor:
    """[U] float32, number of tokens that each row stands for."""
    return torch.bincount(rows).float()


def sees(queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
    """Whether tokens at positions `queries` see those at `keys`: themselves and all, or `window` - 1, before."""
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)


def _moved(value: Any, device: torch.device) -> Any:
    """A copy of a dataclass with its tensors, and those of its shard, on another device.

    Megatron's `cu_seqlens_*` stay on the CPU: only its rotary embedding reads them, as Python numbers, and would wait
    for the GPU in every layer.
    """
    movable = {f.name: getattr(value, f.name) for f in fields(value) if not f.name.startswith("cu_seqlens")}
    tensors = {name: moved(x, device) for name, x in movable.items() if torch.is_tensor(x)}
    return replace(
        value, **tensors, **{name: x.to(device) for name, x in movable.items() if isinstance(x, ContextShard)}
    )
