"""Which sequence is computed on which data parallel rank, and in which micro-batch. Pure Python.

Sequences of one prompt stay together as far as the budget allows, and their prompt is computed, and counted, once.

Invariants, whatever the lengths: every sequence is placed exactly once; every rank has the same number of
micro-batches, because the ranks meet in collectives; a micro-batch holds at most `budget` tokens unless it is one
longer sequence alone. A micro-batch may be empty when there are fewer sequences than places.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class _Bin:
    """Sequences (or bundles of them) placed together, and their tokens."""

    members: list
    tokens: int


def schedule(
    lengths: list[int],
    prompts: list[int],
    prompt_lengths: list[int],
    replicas: int,
    budget: int,
    multiple: int = 1,
) -> list[list[list[int]]]:
    """Sequence numbers by replica and micro-batch; the number of micro-batches is a multiple of `multiple`.

    Bundles of sequences with the same prompt are dealt longest first, each to the replica with the fewest tokens so
    far (longest processing time first); each replica then fills as few micro-batches as the fullest replica needs.
    """
    bundles = _longest_first(_bundles(lengths, prompts, prompt_lengths, budget))
    shares = [_Bin([], 0) for _ in range(replicas)]
    for bundle in bundles:
        share = min(shares, key=lambda s: s.tokens)
        share.members.append(bundle)
        share.tokens += bundle.tokens
    filled = [_first_fit([(b, b.tokens) for b in share.members], 0, budget) for share in shares]
    count = max(1, *(len(bins) for bins in filled))
    count += -count % multiple
    return [
        [[i for bundle in micro.members for i in bundle.members] for micro in bins] + [[]] * (count - len(bins))
        for bins in filled
    ]


def _bundles(lengths: list[int], prompts: list[int], prompt_lengths: list[int], budget: int) -> list[_Bin]:
    """Sequences that share a prompt, cut where they exceed the budget."""
    by_prompt: dict[int, list[int]] = {}
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        by_prompt.setdefault(prompts[i], []).append(i)
    bundles: list[_Bin] = []
    for members in by_prompt.values():
        shared = prompt_lengths[members[0]]
        bundles += _first_fit([(i, lengths[i] - shared) for i in members], shared, budget)
    return bundles


def _first_fit(items: list[tuple], shared: int, budget: int) -> list[_Bin]:
    """Items with their tokens, longest first, into bins of at most `budget` tokens, `shared` of them counted once."""
    bins: list[_Bin] = []
    for item, tokens in items:
        place = next((b for b in bins if b.tokens + tokens <= budget), None)
        if place is None:
            bins.append(_Bin([item], shared + tokens))
        else:
            place.members.append(item)
            place.tokens += tokens
    return bins


def _longest_first(bins: list[_Bin]) -> list[_Bin]:
    return sorted(bins, key=lambda b: -b.tokens)
