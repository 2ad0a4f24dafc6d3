"""Assigns sequences to data parallel replicas (`deal`), and those of a replica to micro-batches (`fill`).

Sequences of one prompt stay together as far as the budget and a balanced load allow; their prompt is then computed
once. Attention that is computed in a table arranges every sequence in full there, as wide as the longest of the
micro-batch; kernels for sequences of any length need none.

Invariants, whatever the lengths: every sequence is in exactly one replica, and in exactly one micro-batch of it; a
micro-batch holds at most `budget` tokens, prompts counted once, in a table of at most `cells` * budget cells, unless it
is a single sequence. Pure Python.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

CELLS = 4
"""Cells of the attention's table per token of the budget: a cell holds query, key, value and output of one layer, a
small part of what a token's row holds."""
CELLS_WITH_MASKS = 1
"""`CELLS` under context parallelism, where every rank has the keys and values of all, and a mask of cells by its rows.
Two cells per token would take 8 GB more of a GPU that trains DeepSeek-V3, and save a quarter of the micro-batches."""


def cells_per_token(cp_size: int, padded: bool = True) -> float:
    """Largest size of the attention's table, in cells per token of the budget, for `cp_size` context parallel ranks.

    Without limit where attention is not `padded`, and has no table.
    """
    if not padded:
        return math.inf
    return CELLS if cp_size == 1 else CELLS_WITH_MASKS


@dataclass
class _Bin:
    """Sequences that are computed together.

    Attributes:
        members: Indices of the sequences.
        tokens: Rows they need, with the prompt of a bundle counted once.
        sequences: Number of rows of the table: of sequences, or of their pieces.
        longest: Tokens of the longest sequence.
    """

    members: list
    tokens: int
    sequences: int
    longest: int

    def has_room(self, more: _Bin, tokens: int, budget: int, cells: float) -> bool:
        """Whether `more`, which needs `tokens` additional rows in this bin, fits."""
        table = (self.sequences + more.sequences) * max(self.longest, more.longest)
        return self.tokens + tokens <= budget and table <= cells * budget

    def add(self, more: _Bin, tokens: int) -> None:
        """Adds `more`, which needs `tokens` additional rows in this bin."""
        self.members += more.members
        self.tokens += tokens
        self.sequences += more.sequences
        self.longest = max(self.longest, more.longest)


def deal(
    lengths: list[int],
    prompts: list[int],
    prompt_lengths: list[int],
    replicas: int,
    budget: int,
    cells: float = CELLS,
    pieces: list[int] | None = None,
) -> list[list[int]]:
    """Indices of the sequences of each replica, ascending, with about equally many tokens in each.

    Bundles of sequences with the same prompt are dealt longest first, each to the replica with the fewest tokens so
    far (longest processing time first). `pieces`: number of rows that each sequence has in the table; None for one.
    """
    bundles = _bundles(lengths, prompts, prompt_lengths, budget, cells, pieces)
    fair = -(-sum(bundle.tokens for bundle in bundles) // replicas)
    if fair < budget:
        # A batch of a few large groups would leave replicas without work, so groups are cut to a fair share.
        bundles = _bundles(lengths, prompts, prompt_lengths, fair, cells, pieces)
    shares: list[list[int]] = [[] for _ in range(replicas)]
    loads = [(0, replica) for replica in range(replicas)]
    for bundle in sorted(bundles, key=lambda b: -b.tokens):
        # Of equal loads the lowest replica is taken, so all ranks deal alike without asking each other.
        load, replica = heapq.heappop(loads)
        shares[replica] += bundle.members
        heapq.heappush(loads, (load + bundle.tokens, replica))
    return [sorted(share) for share in shares]


def fill(
    lengths: list[int],
    prompts: list[int],
    prompt_lengths: list[int],
    budget: int,
    cells: float = CELLS,
    pieces: list[int] | None = None,
) -> list[list[int]]:
    """Indices of the sequences of each micro-batch of one replica: as few micro-batches as first fit needs.

    `pieces`: see `deal`.
    """
    bundles = sorted(_bundles(lengths, prompts, prompt_lengths, budget, cells, pieces), key=lambda b: -b.tokens)
    return [micro.members for micro in _first_fit(bundles, 0, budget, cells)]


def _bundles(
    lengths: list[int],
    prompts: list[int],
    prompt_lengths: list[int],
    limit: int,
    cells: float,
    pieces: list[int] | None,
) -> list[_Bin]:
    """Bins of sequences that share a prompt, of at most `limit` tokens."""
    rows = pieces or [1] * len(lengths)
    by_prompt: dict[int, list[_Bin]] = {}
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        by_prompt.setdefault(prompts[i], []).append(_Bin([i], lengths[i], rows[i], lengths[i]))
    shared = {prompt: prompt_lengths[group[0].members[0]] for prompt, group in by_prompt.items()}
    return [b for prompt, group in by_prompt.items() for b in _first_fit(group, shared[prompt], limit, cells)]


def _first_fit(items: list[_Bin], shared: int, limit: int, cells: float) -> list[_Bin]:
    """Packs items, longest first, into bins of at most `limit` tokens; items of a bin share their `shared` tokens."""
    bins: list[_Bin] = []
    for item in items:
        tokens = item.tokens - shared
        first = next((b for b in bins if b.has_room(item, tokens, limit, cells)), None)
        if first is None:
            bins.append(_Bin([*item.members], item.tokens, item.sequences, item.longest))
        else:
            first.add(item, tokens)
    return bins
