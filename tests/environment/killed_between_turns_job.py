"""Trains three steps with an environment, and writes what each has seen to FOLDER/step-NUMBER.json. Usage:
killed_between_turns_job.py FOLDER LAYOUT... With KILLED_BETWEEN_TURNS set, the ranks are killed in their second
step, in the first poll in which samples go on after a reply of this step."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from conversation_job import SLICED, run, shown

from grpo_mega.environment.journal import FOLDER
from grpo_mega.rollout.engine import TURN, Finished, Wanted
from grpo_mega.run import Run
from grpo_mega.types import Rollout

NAME = "turns"
SETTINGS = [*SLICED, "rollout.in_flight=24", "run.steps=3", "run.save_every=1", "run.keep_checkpoints=9"]


def kill_between_turns(built: Run) -> None:
    """What the engine has generated in that poll is lost."""
    engine = built.stage.rollouts.engine
    submit, poll = engine.submit, engine.poll
    polled_before = going_on = False

    def submitted(wanted: Sequence[Wanted], *how: Any) -> None:
        nonlocal going_on
        going_on |= polled_before and any(one.so_far and one.so_far.finish_reason == TURN for one in wanted)
        submit(wanted, *how)

    def polled(*arguments: Any) -> Finished:
        nonlocal polled_before
        finished = poll(*arguments)
        if going_on:
            os.kill(os.getpid(), signal.SIGKILL)
        polled_before = built.step > 0
        return finished

    engine.submit, engine.poll = submitted, polled


def watch(built: Run, folder: Path) -> None:
    """Writes for each step how many calls the samples had that were in flight before it, its samples, and what the
    journal has asked."""
    next_rollout = built.stage.rollouts.next

    def seen(*arguments: Any) -> Rollout:
        before = [one for group in built.stage.in_flight.groups.values() for one in group.so_far if one]
        rollout = next_rollout(*arguments)
        gathered: list = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, rollout.samples)
        if dist.get_rank() == 0:
            samples = {number: shown(sample) for of_rank in gathered for number, sample in of_rank.items()}
            lines = [
                line
                for path in (folder / NAME / FOLDER / f"step-{built.step:06d}").iterdir()
                for line in path.read_text().splitlines()
            ]
            found = {
                "calls": sorted(len(one.calls) for one in before),
                "samples": [samples[number] for number in sorted(samples)],
                "asked": [json.loads(line)[0] for line in lines if line],
            }
            (folder / f"step-{built.step + 1}.json").write_text(json.dumps(found))
        return rollout

    built.stage.rollouts.next = seen


def main() -> None:
    with run(NAME, *SETTINGS) as built:
        watch(built, Path(sys.argv[1]))
        if "KILLED_BETWEEN_TURNS" in os.environ:
            kill_between_turns(built)
        built.execute()


if __name__ == "__main__":
    main()
