"""What a run needs beside its GPUs: main memory of a machine, room on the disk, problems."""

from __future__ import annotations

from math import lcm
from pathlib import Path

from grpo_mega.config.schema import Config, RunConfig
from grpo_mega.data.records import records
from grpo_mega.data.stored import sources_of

MAIN_MEMORY = 0.9
"""Share of a machine's memory that may be planned; the rest is the system's and the processes' own."""


def checkpoints_at_once(run: RunConfig) -> int:
    """How many checkpoints of its last stage lie in the run directory at most, with the one that is being written."""
    steps = max(1, run.steps)  # where no steps follow the earlier stages, there is one checkpoint, too
    every = run.save_every or steps
    before = -(-steps // every) - 1  # the last step is saved, too
    newest = min(before, run.keep_checkpoints)
    milestones = (before - newest) * every // lcm(every, run.keep_every) if run.keep_every else 0
    return newest + milestones + 1


def exports_in_all(run: RunConfig) -> int:
    """How many exports a run writes: all are kept."""
    return 1 if run.export_every < 0 else -(-max(1, run.steps) // run.export_every) if run.export_every else 0


def problems_at_hand(config: Config) -> int | None:
    """Training problems that come again in every epoch; None when there is no end of them, or not all files are here.

    Those that are held out of them are counted, too.

    Raises:
        ValueError: A file that is here cannot be read.
    """
    if config.data.task != "jsonl":
        return config.data.train_size
    count = 0
    for source in sources_of(config.data).values():
        if source.reasoning_gym:
            count += source.problems
        elif source.path is not None:
            if not Path(source.path).exists():
                return None
            count += sum(1 for _ in records(source.path, source.split))
    return count or None
