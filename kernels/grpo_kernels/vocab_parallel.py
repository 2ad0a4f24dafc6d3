"""Vocabulary sharded over tensor parallel ranks: the columns of a rank, and merging of the ranks' row statistics.

For each row one all-gather transfers four floats of each rank. Every rank merges them in rank order, so all ranks have
the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels.rows import FLOOR, LOWEST


@dataclass(frozen=True)
class Shard:
    """A rank's vocabulary shard.

    Attributes:
        start: Global id of the first column.
        columns: Number of leading columns that are real tokens; the rest is padding.
        vocab_size: Number of real tokens of all ranks together.
        group: The ranks that share the vocabulary, or None when this rank has all of it.
    """

    start: int
    columns: int
    vocab_size: int
    group: dist.ProcessGroup | None

    @property
    def ranks(self) -> int:
        """Number of ranks that share the vocabulary."""
        return 1 if self.group is None else self.group.size()

    def merged(self, stats: Tensor, inv_temperature: float) -> Tensor:
        """Merges [n, 4] statistics of this rank's columns to whole rows'. Every rank of the group must call it."""
        if self.ranks == 1 or not len(stats):
            return stats
        parts = stats.new_empty(self.ranks * len(stats), stats.shape[1])
        dist.all_gather_into_tensor(parts, stats, group=self.group)
        return merge_stats(parts.chunk(self.ranks), inv_temperature)


def shard_of(width: int, vocab_size: int | None, group: dist.ProcessGroup | None) -> Shard:
    """This rank's shard of `width` columns; all ranks have the same width, in rank order.

    Args:
        width: Columns of this rank, padding included.
        vocab_size: Number of real tokens of all ranks; None for no padding.
        group: The ranks that share the vocabulary, or None.

    Raises:
        ValueError: The columns cannot hold such a vocabulary; names the argument.
    """
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    size = ranks * width if vocab_size is None else vocab_size
    if not 1 <= size <= ranks * width:
        raise ValueError(f"vocab_size is {size}; {ranks} x {width} columns hold 1 to {ranks * width} tokens")
    start = rank * width
    return Shard(start, min(max(size - start, 0), width), size, group)


def merge_stats(parts: Sequence[Tensor], inv_temperature: float) -> Tensor:
    """Merges [n, 4] statistics (see `row_stats`) of all shards, in order, to [n, 4] of the whole rows."""
    maximum = torch.stack([part[:, 0] for part in parts]).amax(0)
    finite = maximum.clamp(min=LOWEST)
    s, w = torch.zeros_like(maximum), torch.zeros_like(maximum)
    for part in parts:
        # A shard's sums are relative to its own maximum. Relative to the common one, each d grows by `shift`, so w
        # gains shift * s.
        shift = ((part[:, 0] - finite) * inv_temperature).clamp_(min=FLOOR)
        scale = shift.exp()
        s += part[:, 1] * scale
        w += (part[:, 2] + shift * part[:, 1]) * scale
    # One shard has the target, the others hold -inf there.
    target = torch.stack([part[:, 3] for part in parts]).amax(0)
    return torch.stack([maximum, s, w, target], -1)
