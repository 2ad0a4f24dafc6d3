"""Which sequence is computed on which data parallel rank, and in which micro-batch. Pure Python.

Sequences of one prompt stay together as far as the budget and a fair share of the work allow; their prompt then lies in
the row once. Attention still lays every sequence out in full, in a table as wide as the longest of the micro-batch.

Invariants, whatever the lengths: every sequence is placed exactly once; every rank has the same number of
micro-batches, because the ranks meet in collectives; a micro-batch holds at most `budget` tokens, prompts counted
once, in a table of at most `cells` * budget cells, unless it is one longer sequence alone. A micro-batch may be empty
when there are fewer sequences than places.
"""

from __future__ import annotations

from dataclasses import dataclass

CELLS = 4
"""Cells of the attention's table per token of the budget: a cell holds query, key, value and output of one layer, a
small part of what a token's row holds."""
CELLS_WITH_MASKS = 1
"""The same under context parallelism, where every rank has the keys and values of all, and a mask of cells by its rows.
Twice as many would take 8 GB more of a GPU that trains DeepSeek-V3, with a quarter fewer micro-batches."""


def cells_per_token(cp_size: int) -> int:
    """How large the attention's table may get under context parallelism of so many ranks."""
    return CELLS if cp_size == 1 else CELLS_WITH_MASKS


@dataclass
class _Bin:
    """Sequences, or bundles of them, placed together.

    Attributes:
        members: What is placed.
        tokens: Rows they need, prompts of a bundle counted once.
        sequences, longest: Their number, and tokens of the longest.
    """

    members: list
    tokens: int
    sequences: int
    longest: int

    def has_room(self, more: _Bin, tokens: int, budget: int, cells: int) -> bool:
        """Whether `more`, which needs `tokens` more rows here, fits."""
        table = (self.sequences + more.sequences) * max(self.longest, more.longest)
        return self.tokens + tokens <= budget and table <= cells * budget

    def add(self, more: _Bin, tokens: int) -> None:
        """Places `more` here too."""
        self.members += more.members
        self.tokens += tokens
        self.sequences += more.sequences
        self.longest = max(self.longest, more.longest)


def schedule(
    lengths: list[int],
    prompts: list[int],
    prompt_lengths: list[int],
    replicas: int,
    budget: int,
    multiple: int = 1,
    cells: int = CELLS,
) -> list[list[list[int]]]:
    """Sequence numbers by replica and micro-batch; the number of micro-batches is a multiple of `multiple`.

    Bundles of sequences with the same prompt are dealt longest first, each to the replica with the fewest tokens so
    far (longest processing time first); each replica then fills as few micro-batches as the fullest replica needs.
    """
    bundles = _bundles(lengths, prompts, prompt_lengths, budget, cells)
    fair = -(-sum(bundle.tokens for bundle in bundles) // replicas)
    if fair < budget:  # otherwise a few large groups would leave replicas without work
        bundles = _bundles(lengths, prompts, prompt_lengths, fair, cells)
    shares: list[list[_Bin]] = [[] for _ in range(replicas)]
    loads = [0] * replicas
    for bundle in sorted(bundles, key=lambda b: -b.tokens):
        replica = min(range(replicas), key=lambda r: (loads[r], r))
        shares[replica].append(bundle)
        loads[replica] += bundle.tokens
    packed = [[micro.members for micro in _first_fit(share, 0, budget, cells)] for share in shares]
    count = max(1, *(len(micros) for micros in packed))
    count += -count % multiple
    return [micros + [[] for _ in range(count - len(micros))] for micros in packed]


def _bundles(lengths: list[int], prompts: list[int], prompt_lengths: list[int], limit: int, cells: int) -> list[_Bin]:
    """Sequences that share a prompt, cut where they exceed the limit."""
    by_prompt: dict[int, list[_Bin]] = {}
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        by_prompt.setdefault(prompts[i], []).append(_Bin([i], lengths[i], 1, lengths[i]))
    shared = {prompt: prompt_lengths[group[0].members[0]] for prompt, group in by_prompt.items()}
    return [b for prompt, group in by_prompt.items() for b in _first_fit(group, shared[prompt], limit, cells)]


def _first_fit(items: list[_Bin], shared: int, limit: int, cells: int) -> list[_Bin]:
    """Items, longest first, into bins of at most `limit` tokens; the items of a bin have `shared` tokens in common."""
    bins: list[_Bin] = []
    for item in items:
        tokens = item.tokens - shared
        place = next((b for b in bins if b.has_room(item, tokens, limit, cells)), None)
        if place is None:
            bins.append(_Bin([*item.members], item.tokens, item.sequences, item.longest))
        else:
            place.add(item, tokens)
    return bins
