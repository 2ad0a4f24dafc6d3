"""Which samples of a step an optimizer update is made of, and which count in it although nothing can move them."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """One mini-batch; samples go by their numbers within the step.

    Attributes:
        trained: Its samples that are computed, in rising order; at least one.
        left_out: Its samples that only count in its denominators.
    """

    trained: list[int]
    left_out: list[int]


def deal(counted: Sequence[int], trained: Collection[int], parts: int, seed: str) -> list[Share]:
    """Shuffles the samples that count and deals them out to mini-batches whose sizes differ by one at most.

    Samples that are left out of the computation are dealt like all others. So each mini-batch, its denominators and
    its gradient are what they would be if everything were computed, and leaving out costs nothing but saves time. A
    mini-batch without a trained sample has no gradient and is not returned: it is no update.

    Args:
        counted: Numbers of the samples that count.
        trained: Those of them that are computed.
        parts: Mini-batches wanted; there are never more than samples.
        seed: What the order follows from.

    Returns:
        The mini-batches, in the order of the updates.
    """
    order = list(counted)
    random.Random(seed).shuffle(order)
    trained = set(trained)
    dealt = [sorted(order[part::parts]) for part in range(min(parts, len(order)))]
    shares = [Share([i for i in part if i in trained], [i for i in part if i not in trained]) for part in dealt]
    return [share for share in shares if share.trained]
