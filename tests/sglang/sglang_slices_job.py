"""A GRPO run on SGLang whose samples outlive steps, and whose engines are killed within a slice.

Usage: sglang_slices_job.py FOLDER OVERRIDE... ; prints what was seen as JSON.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "stages"))

from grpo_job import KILLED_IN_STEP, killing
from grpo_run import step, watched_updates
from on_cuda import TINY
from slices_job import CORRECTED, by_name, everyones, grpo, off, tensors_of, watched

from grpo_mega.rollout.engine import Wanted
from grpo_mega.run import Run
from grpo_mega.types import Sample

SLICE_TOKENS = 3
STEPS = KILLED_IN_STEP + 3
SLICED = [
    *CORRECTED,
    "model=tiny_qwen3_moe",
    *TINY,
    "rollout.engine=sglang",
    "rollout.sglang.verify_every=1",
    "rollout.sglang.routing_replay=true",
    f"rollout.slice_tokens={SLICE_TOKENS}",
    "rollout.in_flight=8",
    "rollout.reserve=4",
    "rollout.max_new_tokens=24",
    "optimizer.lr=1e-3",  # at 1e-2 completions get so short that none outlives a step
]


def main() -> None:
    with grpo("sliced", *SLICED) as built:
        engine, metrics, weights, unfinished = built.stage.rollouts.engine, [], {}, []
        began, rollouts, updates = submissions(built), watched(built), watched_updates(built)
        before, built.stop.asked = engine.pids(), killing(built, built.stage.rollouts.access)
        for _ in range(STEPS):
            weights[built.model.updates] = [x.detach().clone() for x in tensors_of(built)]
            metrics.append(step(built))
            groups = built.stage.in_flight.groups.values()
            unfinished.append(sum(one is not None for group in groups for one in group.so_far))
        samples, waiting = by_name(rollouts), built.stage.in_flight
        routed_anew = [replace(sample, experts=None) for sample in samples.values()]
        found = {
            "metrics": metrics,
            "unfinished": unfinished,
            "engine": [before, engine.pids()],
            "submitted": waiting.submitted,
            "known": len({name for name, _ in samples} | {group.prompt.id for group in waiting.groups.values()}),
            "taken": sum(len(rollout.samples) for rollout in rollouts),
            "unlike": [name for name, s in samples.items() if [*s.segments] != segments_of(s, began[name])],
            "segments": max(len(s.segments) for s in samples.values()),
            "trained": trained_once(rollouts, [batch for batch, _ in updates]),
            "unrouted": sum(map(unrouted, [batch for batch, _ in updates])),
            # Last, as it replaces the weights. Experts are those of the last slice, so each version chooses its own.
            "own": [off(built, routed_anew, weights, version) for version in weights],
            "drift": off(built, routed_anew, {0: weights[max(weights)]}, 0),
        }
    print(json.dumps(found))


def submissions(built: Run) -> dict[tuple[str, int], dict[int, int]]:
    """A dict that will hold what the engine is asked for: sample -> {tokens it has: version that adds the next}."""
    began: dict[tuple[str, int], dict[int, int]] = {}
    submit = built.stage.rollouts.engine.submit

    def seen(wanted: Sequence[Wanted], sampling: Any, version: int) -> None:
        for one in wanted:
            done = len(one.so_far.token_ids) if one.so_far else 0
            began.setdefault((one.prompt.id, one.index), {})[done] = version
        submit(wanted, sampling, version)

    built.stage.rollouts.engine.submit = seen
    return began


def segments_of(sample: Sample, began: dict[int, int]) -> list[tuple[int, int]]:
    """The segments that follow from the positions at which each slice began."""
    # A sample of the reserve begins within a slice.
    length = len(sample.token_ids)
    first = [*began, length][1]
    assert 0 < first <= SLICE_TOKENS
    assert [*began] == [0, *range(first, length, SLICE_TOKENS)], "a slice is missing, or of another length"
    return [next(same) for _, same in groupby(began.items(), key=lambda slice: slice[1])]


def trained_once(rollouts: list[Any], batches: list[Any]) -> bool:
    """Whether the updates learned each sampled token of the groups with signal once, and nothing else."""
    expected, learned = Counter(), Counter()
    for rollout in rollouts:
        numbers = iter(range(len(rollout.samples)))
        for group in rollout.groups:
            of_group = [rollout.samples[next(numbers)] for _ in group.infos]
            if len(set(group.rewards)) > 1:
                expected.update((s.prompt.token_ids, *[tuple(s.token_ids)]) for s in of_group)
    for batch in (batch for of_rank in everyones(batches) for batch in of_rank):
        lengths = batch.lengths.tolist()
        for tokens, mask in zip(batch.tokens.split(lengths), batch.mask.split(lengths), strict=True):
            learned[tuple(tokens[~mask].tolist()), tuple(tokens[mask].tolist())] += 1
    return expected == learned


def unrouted(batch: Any) -> int:
    """Tokens of a batch whose experts are unknown, beyond the last of each sequence, which no engine has read."""
    last = batch.cu_seqlens[1:] - 1
    known = (batch.experts >= 0).flatten(1).all(1)
    known[last] = True
    return int((~known).sum())


if __name__ == "__main__":
    main()
