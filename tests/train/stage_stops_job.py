"""One rank of runs through all stages that are asked to stop in each of them; prints how each start ended, as JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import torch.distributed as dist
from composed import composed
from forks import free_port
from train_jobs import SMALL

from grpo_mega import platform

HERE = platform.start()

from grpo_mega.assemble import assemble  # noqa: E402
from grpo_mega.data import build_data  # noqa: E402
from grpo_mega.platform.collectives import from_main_rank  # noqa: E402
from grpo_mega.platform.stop import Stopped  # noqa: E402
from grpo_mega.reward.compose import build_reward  # noqa: E402


def start(root: str, overrides: list[str], moment: str) -> str:
    """Runs until the n-th update of this start, until GRPO begins, or to the end; one rank alone is asked to stop."""
    platform.join_processes(HERE)
    config = composed(*SMALL, f"run.root={root}", *overrides)
    with assemble(config, HERE, build_data(config), build_reward(config.reward)) as run:
        what, _, number = moment.partition(":")
        if what == "update":
            signal_at(run.model, "update", int(number))
        elif what == "begin":
            signal_at(run.stages[-1], "begin", 1)
        try:
            run.execute()
            end = "completed"
        except Stopped as stopped:
            end = str(stopped)
        os.environ["MASTER_PORT"] = str(from_main_rank(free_port))
    return end


def signal_at(owner: Any, method: str, number: int) -> None:
    """The last rank gets SIGTERM before the n-th call of a method."""
    original, calls = getattr(owner, method), []

    def watched(*arguments: Any, **named: Any) -> Any:
        calls.append(None)
        if len(calls) == number and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments, **named)

    setattr(owner, method, watched)


if __name__ == "__main__":
    print(json.dumps([start(*task) for task in json.loads(sys.argv[1])]))
