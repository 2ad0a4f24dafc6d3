"""Which rank of which job is rehearsed with which sequences: what a rehearsal's process is told."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from functools import cached_property

from grpo_mega.config.load import compose_config
from grpo_mega.config.rules import ConfigError
from grpo_mega.config.schema import Config

BAD_SETTINGS = 2
"""Exit code of a rank's process whose settings cannot run here; it writes why where its numbers would be."""


@dataclass(frozen=True)
class RankSpec:
    """A rank of a job, and the sequences of its replica's batch.

    Attributes:
        settings: Experiment and overrides, as for training.
        rank, world_size: The rank, and how many there are.
        lengths: Tokens of each sequence that the replica has in a pass.
        imbalance: Tokens of this rank's experts over those of the average rank's.
        sequences: What the lengths are called in reports: "balanced", "skewed", "given".
        capacity: Bytes of the GPU, as CUDA shows them.
        taken: Bytes of it that are not the trainer's: libraries, and a sleeping engine.
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
        """The inverse of `to_json`."""
        fields = json.loads(text)
        return cls(**fields | {"settings": tuple(fields["settings"]), "lengths": tuple(fields["lengths"])})


def balanced(config: Config) -> tuple[int, ...]:
    """Lengths that fill as many micro-batches as there are stages with equal sequences.

    They are as long as a context parallel rank has tokens, or as the context: the planner's worst case.
    """
    layout = config.layout
    longest = min(layout.micro_batch_tokens // layout.cp, config.model.context)
    return (longest,) * (layout.micro_batch_tokens // longest * layout.pp)


def skewed(config: Config, cells: float) -> tuple[int, ...]:
    """Lengths that fill as many micro-batches as there are stages with one sequence as long as can be, and short ones.

    There are as many of these as the attention's table, of `cells` per token of the budget, has room for; and one for
    every 256 tokens where attention has no table.
    """
    layout = config.layout
    longest = min(layout.micro_batch_tokens, config.model.context)
    without_table = (layout.micro_batch_tokens - longest) // 256
    others = without_table if math.isinf(cells) else int(cells * layout.micro_batch_tokens // longest) - 1
    short = min(longest, (layout.micro_batch_tokens - longest) // others) if others else 0
    return ((longest,) + (short,) * (others if short >= 2 else 0)) * layout.pp


def check_lengths(config: Config, lengths: tuple[int, ...]) -> None:
    """Raises a ConfigError for lengths that no sequence can have."""
    for length in lengths:
        if not 2 <= length <= config.model.context:
            raise ConfigError(
                f"--lengths {length}: a sequence has 2 to model.context={config.model.context} tokens; give a shorter "
                "one, or raise model.context"
            )
