"""Splits the samples of a step into mini-batches, one for each optimizer update."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

from grpo_mega.types import MiniBatch


def make_mini_batches(counted: Sequence[int], trained: Collection[int], parts: int, seed: str) -> list[MiniBatch]:
    """Shuffles the samples that count and splits them into mini-batches whose sizes differ by one at most.

    Samples left out of the computation are distributed like all others, so each mini-batch has the denominators and the
    gradient that it would have if everything were computed. A mini-batch without trained samples has no gradient and is
    not returned.

    Args:
        counted: Numbers of the samples that count in denominators.
        trained: Samples of these that are computed.
        parts: Number of mini-batches; if there are fewer samples, there is one for each.
        seed: Determines the order.

    Returns:
        The mini-batches, in the order of the updates.
    """
    order = list(counted)
    # Python seeds from text by SHA-512, not by its salted hash, so all ranks get the same order.
    random.Random(seed).shuffle(order)
    trained = set(trained)
    split = [sorted(order[part::parts]) for part in range(min(parts, len(order)))]
    mini_batches = [
        MiniBatch([i for i in part if i in trained], [i for i in part if i not in trained]) for part in split
    ]
    return [mini_batch for mini_batch in mini_batches if mini_batch.trained]
