"""Which sequence is computed on which data parallel rank, and in which micro-batch. Pure Python.

Invariants, whatever the lengths: every sequence is placed exactly once; every rank has the same number of
micro-batches, because the ranks meet in collectives; a micro-batch holds at most `budget` tokens unless it is one
longer sequence alone. A micro-batch may be empty when there are fewer sequences than places.
"""

from __future__ import annotations


def schedule(lengths: list[int], replicas: int, budget: int) -> list[list[list[int]]]:
    """Sequence numbers by replica and micro-batch.

    The longest sequences are dealt first, each to the replica with the fewest tokens so far (longest processing
    time first); each replica then fills as few micro-batches as the fullest replica needs.
    """
    by_length = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    shares: list[list[int]] = [[] for _ in range(replicas)]
    loads = [0] * replicas
    for i in by_length:
        replica = min(range(replicas), key=lambda r: (loads[r], r))
        shares[replica].append(i)
        loads[replica] += lengths[i]
    packed = [_fill(share, lengths, budget) for share in shares]
    count = max(1, *(len(p) for p in packed))
    return [p + [[] for _ in range(count - len(p))] for p in packed]


def _fill(share: list[int], lengths: list[int], budget: int) -> list[list[int]]:
    """First fit of one replica's sequences, longest first, into micro-batches of at most `budget` tokens."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in share:
        place = next((b for b, left in enumerate(room) if lengths[i] <= left), None)
        if place is None:
            bins.append([i])
            room.append(budget - lengths[i])
        else:
            bins[place].append(i)
            room[place] -= lengths[i]
    return bins
