"""State, in a checkpoint, of a step that was stopped after some of its updates.

    step-in-progress.json            shared by all ranks
    step-in-progress-0003-of-0008.pt columns of the sequences that replica 3 of 8 computes

Sequences have numbers that are independent of the layout.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpo_mega.checkpoint.integrity import files_in_manifest
from grpo_mega.checkpoint.safe_load import load_tensors
from grpo_mega.errors import InputError
from grpo_mega.platform.files import write_atomic
from grpo_mega.types import NOBODY, Batch, Group, MiniBatch, Prompt, SampleInfo, Score, Step

# Importing it at run time would import Megatron, which this file does not need.
if TYPE_CHECKING:
    from grpo_mega.models.topology import Topology

NAME = "step-in-progress"
FILE = f"{NAME}.json"
PER_SEQUENCE = ("numbers", "prompts", "prompt_lengths")


def save(checkpoint: Path, step: Step, topology: Topology) -> None:
    """Writes the step into the checkpoint; every rank must call it, and one per replica writes its batch."""
    if topology.is_main:
        record = {name: value for name, value in vars(step).items() if name != "batch"}
        # Which ranks hold the samples means nothing under another layout. "answers" is the key of earlier releases.
        groups = [
            {"prompt": asdict(group.prompt), "answers": [asdict(replace(info, holder=NOBODY)) for info in group.infos]}
            for group in step.groups
        ]
        # The batch is stored apart, by replica; the number of replicas tells a reader how many files to expect.
        record |= {
            "groups": groups,
            "epochs": [[asdict(mini_batch) for mini_batch in epoch] for epoch in step.epochs],
            "replicas": topology.dp_size if step.batch else 0,
        }
        write_atomic(checkpoint / FILE, json.dumps(record))
    if topology.is_first_of_replica and step.batch is not None:
        # Ranks of one replica hold the same batch, so one of them writes it.
        there = {name: value for name, value in vars(step.batch).items() if value is not None}
        torch.save(there, checkpoint / batch_file(topology.dp_rank, topology.dp_size))


def load(checkpoint: Path, topology: Topology) -> Step | None:
    """Loads the saved step, with a batch for this replica; None if the checkpoint was written between two steps.

    With the same number of replicas, each gets its own batch, bit for bit. Otherwise the sequences are redistributed.
    """
    files = files_in_manifest(checkpoint)
    if FILE not in files:
        return None
    record = json.loads((checkpoint / FILE).read_text())
    saved = [batch_file(replica, record["replicas"]) for replica in range(record["replicas"])]
    if missing := [name for name in saved if name not in files]:
        what = f"the checkpoint cannot be used: its manifest does not name {missing[0]}"
        raise InputError(str(checkpoint), what, "choose another")
    if "version" not in record:
        what = "an older version of grpo_mega wrote it in the middle of a step"
        fix = "finish the step with that version, or move this checkpoint away: the one before it is between two steps"
        raise InputError(str(checkpoint), what, fix)
    return Step(
        [Group(prompt_of(one["prompt"]), tuple(map(info_of, one["answers"]))) for one in record["groups"]],
        record["signal"],
        [[MiniBatch(**mini_batch) for mini_batch in epoch] for epoch in record["epochs"]],
        _batch([checkpoint / name for name in saved], topology) if saved else None,
        record["shown"] if topology.is_main else [],
        record["updates"],
        record["mismatch"],
        record["shown_groups"],
        record["loads"],
        record["version"],
    )


def _batch(files: list[Path], topology: Topology) -> Batch:
    """This replica's batch, redistributed from the batches in `files`, one for each former replica."""
    replica, replicas = topology.dp_rank, topology.dp_size
    if len(files) == replicas:
        return Batch(**load_tensors(files[replica]))
    # Every replica needs rows of every file. Memory-mapped, only the selected rows are read from disk.
    parts = [Batch(**load_tensors(file, mapped=True)) for file in files]
    numbers = sorted(number for part in parts for number in part.numbers.tolist())
    # Dealt out by number, so that the result does not depend on how many replicas saved the batch.
    mine = set(numbers[replica::replicas])
    rows = [[row for row, number in enumerate(part.numbers.tolist()) if number in mine] for part in parts]
    return _joined([part.select(chosen) for part, chosen in zip(parts, rows, strict=True)])


def _joined(parts: list[Batch]) -> Batch:
    """All sequences of these batches in one, in the order of their numbers."""
    lengths = torch.cat([part.lengths for part in parts])
    per_sequence = {name: torch.cat([getattr(part, name) for part in parts]) for name in PER_SEQUENCE}
    known = [part.experts for part in parts if part.experts is not None]
    # Parts can be joined only with equal columns. A replica whose samples all lack recorded experts has no such column;
    # it gets one in which the router chooses for every token. The same goes for restarts.
    if known:
        shape, dtype = known[0].shape[1:], known[0].dtype
        parts = [
            part
            if part.experts is not None
            else part.with_(experts=torch.full((len(part.tokens), *shape), -1, dtype=dtype))
            for part in parts
        ]
    if any(part.restarts is not None for part in parts):
        parts = [
            part if part.restarts is not None else part.with_(restarts=torch.zeros_like(part.mask)) for part in parts
        ]
    columns = {name: torch.cat([part.columns()[name] for part in parts]) for name in parts[0].columns()}
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    joined = Batch(cu_seqlens=cu_seqlens, **per_sequence, **columns)
    return joined.select(joined.numbers.argsort().tolist())


def batch_file(replica: int, replicas: int) -> str:
    """File name of the batch of replica `replica` of `replicas`."""
    return f"{NAME}-{replica:04d}-of-{replicas:04d}.pt"


def prompt_of(record: dict[str, Any]) -> Prompt:
    """The prompt of which `dataclasses.asdict` made this record, also after JSON."""
    return Prompt(**record | {"token_ids": tuple(record["token_ids"])})


def info_of(record: dict[str, Any]) -> SampleInfo:
    """The info of a sample of which `dataclasses.asdict` made this record, also after JSON."""
    segments = tuple((first, version) for first, version in record["segments"])
    given = tuple((first, end) for first, end in record["given"])
    steps = tuple((end, reward) for end, reward in record["score"].get("steps", ()))
    score = Score(**record["score"] | {"steps": steps})
    restarts = (*record.get("restarts", ()),)  # earlier checkpoints have none
    return SampleInfo(**record | {"segments": segments, "given": given, "score": score, "restarts": restarts})
