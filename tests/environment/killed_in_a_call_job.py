"""Trains three steps with a clock as environment, and writes the digests after them to FOLDER/digests.json. Usage:
killed_in_a_call_job.py FOLDER SETTING... With CLOCK_KILLS_AT set, each rank is killed in that call of its environment,
or at the end: before any checkpoint."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch.distributed as dist
from clock_environment import KILL_AT, TRAINER
from grpo_run import config_of, digest, here, step

from grpo_mega import platform
from grpo_mega.assemble import assemble
from grpo_mega.data import build_data
from grpo_mega.reward.compose import build_reward

CLOCK = [
    "environment.path=clock_environment:Clock",
    "environment.open='+'",
    "environment.close='='",
    "environment.max_calls=3",
    "environment.at_once=1",
    "reward.terms=[{name:environment}]",
    "reward.success=environment",
    "rollout.max_new_tokens=24",
]


def main() -> None:
    os.environ[TRAINER] = str(os.getpid())
    config = config_of("clock", *CLOCK, *sys.argv[2:])
    platform.join_processes(here)
    with assemble(config, here, build_data(config), build_reward(config.reward, config.run.seed)) as built:
        built.enter(built.stages[-1])
        digests = []
        for _ in range(3):
            step(built)
            digests.append(digest(built))
            if dist.get_rank() == 0:
                Path(sys.argv[1], "digests.json").write_text(json.dumps(digests))
        dist.barrier()
        if KILL_AT in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
