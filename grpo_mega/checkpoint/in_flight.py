"""State, in a checkpoint, of the samples in flight: generated in part, or complete and waiting for their step.

    in-flight.json             shared by all ranks: groups, infos of samples, counters
    in-flight-0003-of-0008.pt  tokens, log-probs and experts of the finished samples that rank 3 of 8 holds; in that of
                               rank 0 also those of the unfinished samples, which all ranks hold

Only runs whose samples outlive steps (`rollout.slice_tokens`, `rollout.ahead`) have these files.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpo_mega.checkpoint.integrity import files_in_manifest
from grpo_mega.checkpoint.safe_load import load_tensors
from grpo_mega.checkpoint.step_in_progress import info_of, prompt_of
from grpo_mega.errors import InputError
from grpo_mega.platform.collectives import from_main_rank
from grpo_mega.platform.files import write_atomic
from grpo_mega.types import Call, GroupInFlight, Prompt, Sample, StreamState

# Importing it at run time would import Megatron, which this file does not need.
if TYPE_CHECKING:
    from grpo_mega.models.topology import Topology

NAME = "in-flight"
FILE = f"{NAME}.json"


def save(checkpoint: Path, state: StreamState, topology: Topology) -> None:
    """Writes the samples in flight into the checkpoint; every rank must call it, and writes those that it holds."""
    size = _group_size(state.groups.values())
    held = [(number, sample) for number, sample in sorted(state.samples.items())]
    if topology.is_main:
        unfinished = {
            number * size + index: sample
            for number, group in state.groups.items()
            for index, sample in enumerate(group.so_far)
            if sample
        }
        held += unfinished.items()
        groups = {
            number: {
                "prompt": asdict(group.prompt),
                "answers": [info and asdict(info) for info in group.infos],  # the key of earlier releases
                "draw": group.draw,
                "seats": group.seats,
                "completed": group.completed,
            }
            for number, group in state.groups.items()
        }
        record = {"submitted": state.submitted, "slices": state.slices, "groups": groups}
        write_atomic(checkpoint / FILE, json.dumps(record | {"ranks": topology.world_size}))
    torch.save(_columns(held), checkpoint / rank_file(topology.rank, topology.world_size))


def load(checkpoint: Path, topology: Topology) -> StreamState | None:
    """Loads the samples in flight; None if the checkpoint is of a run without them.

    With the same number of ranks, each holds the samples that it held. Otherwise they are dealt out anew.
    """
    files = files_in_manifest(checkpoint)
    if FILE not in files:
        return None
    record = json.loads((checkpoint / FILE).read_text())
    ranks = record["ranks"]
    if missing := [name for name in (rank_file(rank, ranks) for rank in range(ranks)) if name not in files]:
        what = f"the checkpoint cannot be used: its manifest does not name {missing[0]}"
        raise InputError(str(checkpoint), what, "choose another")
    groups = {}
    for number, saved in record["groups"].items():
        infos = [info and info_of(info) for info in saved["answers"]]
        prompt, draw, completed = prompt_of(saved["prompt"]), saved["draw"], saved["completed"]
        seats = saved.get("seats", [])  # checkpoints before `rollout.reserve` have none
        groups[int(number)] = GroupInFlight(prompt, draw, [None] * len(infos), infos, seats, completed)
    size = _group_size(groups.values())
    state = StreamState(groups, record["submitted"], record["slices"])

    def samples_of(rank: int) -> dict[int, Sample]:
        columns = load_tensors(checkpoint / rank_file(rank, ranks))
        numbers = json.loads(columns["samples"])
        return {one["number"]: _sample(one, groups[one["number"] // size].prompt, columns) for one in numbers}

    # What is in the file of rank r belongs to rank r, or to rank r modulo the number of ranks if there are fewer now.
    for rank in range(ranks):
        if rank % topology.world_size == topology.rank:
            samples = samples_of(rank)
            state.samples |= {n: s for n, s in samples.items() if groups[n // size].infos[n % size] is not None}
    # One rank reads the unfinished samples, which all ranks need, and sends them to the others.
    unfinished = from_main_rank(
        lambda: {n: s for n, s in samples_of(0).items() if groups[n // size].infos[n % size] is None}
    )
    for number, sample in unfinished.items():
        group = groups[number // size]
        group.so_far[number % size] = replace(sample, prompt=group.prompt)
    for group in groups.values():
        group.infos = [info and replace(info, holder=info.holder % topology.world_size) for info in group.infos]
    return state


def rank_file(rank: int, ranks: int) -> str:
    """File name of the samples of rank `rank` of `ranks`."""
    return f"{NAME}-{rank:04d}-of-{ranks:04d}.pt"


def _group_size(groups: Iterable[GroupInFlight]) -> int:
    return next((len(group.infos) for group in groups), 1)


def _columns(held: list[tuple[int, Sample]]) -> dict[str, Any]:
    """The samples: token ids and log-probs one after the other as tensors, experts by number, the rest as JSON."""
    records, first = [], 0
    ids, logprobs = array("i"), array("f")
    for number, sample in held:
        ids.extend(sample.token_ids)
        logprobs.extend(sample.logprobs)
        records.append(
            {
                "number": number,
                "first": first,
                "end": first + len(sample.token_ids),
                "index": sample.index,
                "finish_reason": sample.finish_reason,
                "segments": sample.segments,
                "text": sample.text,
                "given": sample.given,
                "restarts": sample.restarts,
                "calls": sample.calls,
            }
        )
        first += len(sample.token_ids)
    return {
        "samples": json.dumps(records),
        "token_ids": torch.tensor(ids, dtype=torch.int32),
        "logprobs": torch.tensor(logprobs, dtype=torch.float32),
        "experts": {number: sample.experts for number, sample in held if sample.experts is not None},
    }


def _sample(record: dict[str, Any], prompt: Prompt, columns: dict[str, Any]) -> Sample:
    tokens = slice(record["first"], record["end"])
    return Sample(
        prompt,
        record["index"],
        array("i", columns["token_ids"][tokens].numpy().tobytes()),
        array("f", columns["logprobs"][tokens].numpy().tobytes()),
        record["finish_reason"],
        tuple((first, version) for first, version in record["segments"]),
        record["text"],
        columns.get("experts", {}).get(record["number"]),  # earlier checkpoints have none
        given=tuple((first, end) for first, end in record["given"]),
        calls=tuple(Call(*call) for call in record["calls"]),
        restarts=(*record.get("restarts", ()),),  # earlier checkpoints have none
        number=record["number"],
    )
