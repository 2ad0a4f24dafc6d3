"""Input of a rehearsal's process: the rank, its job and its sequences."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from functools import cached_property

from grpo_mega.config.load import compose_config
from grpo_mega.config.schema import Config, LayoutConfig

BAD_SETTINGS = 2
"""Exit code of a rank's process whose settings cannot run here; the reasons replace its numbers in the output."""


@dataclass(frozen=True)
class RankSpec:
    """A rank of a job, and the sequences of its replica's batch.

    Attributes:
        settings: Experiment and overrides, as for training.
        rank, world_size: The rank, and the number of ranks.
        lengths: Tokens of each sequence of the replica in a pass.
        imbalance: Tokens of this rank's experts over those of the average rank's.
        sequences: Name of the lengths in reports: "balanced", "skewed", "given".
        capacity: Bytes of the GPU, as CUDA shows them.
        taken: Bytes of it that the trainer cannot have: libraries, and a sleeping engine.
    """

    settings: tuple[str, ...]
    rank: int
    world_size: int
    lengths: tuple[int, ...]
    imbalance: float
    sequences: str
    capacity: int
    taken: int

    @cached_property
    def config(self) -> Config:
        """The configuration of these settings."""
        return compose_config([*self.settings])

    def to_json(self) -> str:
        """All fields, for another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankSpec:
        """Reads what `to_json` wrote."""
        fields = json.loads(text)
        return cls(**fields | {"settings": tuple(fields["settings"]), "lengths": tuple(fields["lengths"])})


def balanced(layout: LayoutConfig, context: int) -> tuple[int, ...]:
    """Lengths that fill as many micro-batches as there are stages with equal sequences.

    Each is as long as the tokens of one context parallel rank, or as the context if that is shorter: the planner's
    worst case.
    """
    longest = min(layout.micro_batch_tokens // layout.cp, context)
    return (longest,) * (layout.micro_batch_tokens // longest * layout.pp)


def skewed(layout: LayoutConfig, context: int, cells: float) -> tuple[int, ...]:
    """Lengths that fill as many micro-batches as there are stages, each with one longest sequence and short ones.

    The number of short ones is what the attention's table, of `cells` per token of the budget, has room for; where
    attention has no table, one for every 256 tokens.
    """
    longest = min(layout.micro_batch_tokens, context)
    without_table = (layout.micro_batch_tokens - longest) // 256
    others = without_table if math.isinf(cells) else int(cells * layout.micro_batch_tokens // longest) - 1
    short = min(longest, (layout.micro_batch_tokens - longest) // others) if others else 0
    return ((longest,) + (short,) * (others if short >= 2 else 0)) * layout.pp
