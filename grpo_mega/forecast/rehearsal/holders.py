"""Which ranks hold the parts of a model that this rank does not: as its own parts say of tensors that are alike."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from grpo_mega.models.shards import Box
from grpo_mega.weights.names import NamedTensor


@dataclass(frozen=True)
class _Cut:
    """How tensors of one kind are cut: every so many shards, one after the other, are of as many ranks in turn.

    Attributes:
        shape: Of a shard.
        ranks: How many ranks share a tensor.
        own: Which of them this rank is.
    """

    shape: tuple[int, ...]
    ranks: int
    own: int


def holders(
    wanted: Iterable[NamedTensor], held: Mapping[str, Iterable[Box]], me: int, group: int, stages: int
) -> dict[str, dict[Box, int]]:
    """{key of a tensor: {shard: rank of the group that sends it}}, each tensor whole.

    A tensor of which this rank holds a part is shared with the ranks after and before it. Others are one stage further,
    or of another rank with experts, and cut like those of their kind here; one that has none here is not cut.

    Args:
        wanted: All tensors.
        held: Shards that this rank holds.
        me: This rank's number in the group.
        group: Ranks in the group.
        stages: Pipeline stages among them.
    """
    wholes = {entry.key: whole(entry) for entry in wanted}
    own = {key: sorted(held[key]) for key in wholes if key in held}
    cuts = {_kind(key): _cut(wholes[key], boxes) for key, boxes in own.items()}
    found = {}
    for key, shape in wholes.items():
        cut = cuts.get(_kind(key)) or _Cut(shape, 1, 0)
        if any(size % part for size, part in zip(shape, cut.shape, strict=True)):
            cut = _Cut(shape, 1, 0)
        further = 0 if key in own else group // stages if stages > 1 else cut.ranks
        first = me - cut.own + further
        found[key] = {box: (first + i % cut.ranks) % group for i, box in enumerate(_tiles(shape, cut.shape))}
    return found


def whole(entry: NamedTensor) -> tuple[int, ...]:
    """Shape of the Megatron tensor that holds a Hugging Face tensor."""
    others = entry.shape[1:2] if entry.place else entry.shape[1:]
    selected = entry.numel // math.prod(others)
    return (selected // (entry.rows.stop - entry.rows.start) * entry.rows.period, *others)


def _cut(shape: tuple[int, ...], own: Sequence[Box]) -> _Cut:
    part = tuple(last - first for first, last in own[0])
    tiles = [*_tiles(shape, part)]
    ranks = len(tiles) // len(own)
    return _Cut(part, ranks, tiles.index(own[0]) % ranks)


def _tiles(shape: Sequence[int], part: Sequence[int]) -> Iterator[Box]:
    """Boxes of this size that a tensor consists of, row by row."""
    axes = [range(0, size, step) for size, step in zip(shape, part, strict=True)]
    for corner in product(*axes):
        yield tuple((at, at + size) for at, size in zip(corner, part, strict=True))


def _kind(key: str) -> str:
    """What tensors of all layers and experts have in common."""
    return re.sub(r"\.\d+\b", "", key)
