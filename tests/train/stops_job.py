"""Runs that ask themselves to stop at known moments, in one process group; started by run_ranks.

Usage: stops_job.py FOLDER TASKS, where TASKS is a JSON list and a task one of

    ["run", OVERRIDES, MOMENTS]    trains in FOLDER, starting once per moment; a moment is "end" or
                                   METHOD:STEP:UPDATES:CALL:RANK, at which RANK alone sends itself SIGTERM: this CALL of
                                   METHOD of Trainer or Policy, when STEP steps are done and UPDATES of the next one
                                   (-: it has none to do yet). It gets another signal when it saves
    ["generate", OVERRIDES, RANK]  generates while RANK alone is interrupted from decode step four on, and in peace

Prints a list with one entry per task: how each start ended, or what the ranks saw.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from grpo_mega.platform.stop import Interrupted, Stopped  # noqa: E402
from grpo_mega.reward.compose import build_reward  # noqa: E402
from grpo_mega.rollout import stream  # noqa: E402
from grpo_mega.run import Run  # noqa: E402


@contextmanager
def grpo(root: str, overrides: list[str]) -> Iterator[Run]:
    """A run of GRPO with random weights that has begun, or continues in its run directory."""
    platform.join_processes(HERE)
    config = composed(*SMALL, "base=none", f"run.root={root}", *overrides)
    with assemble(config, HERE, build_data(config), build_reward(config.reward)) as built:
        built.enter(built.stages[-1])
        yield built
        os.environ["MASTER_PORT"] = str(from_main_rank(free_port))


def run(root: str, overrides: list[str], moments: list[str]) -> list[str]:
    """How each start ended."""
    return [start(root, overrides, moment) for moment in moments]


def start(root: str, overrides: list[str], moment: str) -> str:
    """Runs until the moment, or to the end."""
    with grpo(root, overrides) as built:
        if moment != "end":
            method, *place, call, rank = moment.split(":")
            if dist.get_rank() == int(rank):
                owners = (built.stage, built.stage.rollouts, built.model)
                owner = next((owner for owner in owners if hasattr(owner, method)), None)
                assert owner, f"nobody has {method}: the moment {moment} never comes"
                before(owner, method, Signal(built, tuple(place), int(call)))
                before(built, "state_dict", lambda: built.stop.asked() and os.kill(os.getpid(), signal.SIGUSR1))
        try:
            built.execute()
        except Stopped as stopped:
            return str(stopped)
        return "completed"


def before(thing: Any, method: str, work: Callable[[], Any]) -> None:
    """Has `work` done whenever the method is called."""
    original = getattr(thing, method)

    def followed(*arguments: Any, **named: Any) -> Any:
        work()
        return original(*arguments, **named)

    setattr(thing, method, followed)


class Signal:
    """Sends SIGTERM to this process at the n-th call that is made at the right place of a run."""

    def __init__(self, run: Run, place: tuple[str, ...], call: int) -> None:
        self.run, self.place, self.left = run, place, call

    def __call__(self) -> None:
        rest = self.run.stage.in_progress
        self.left -= (str(self.run.step), str(len(rest.updates)) if rest else "-") == self.place
        if self.left == 0:
            self.left = -1
            os.kill(os.getpid(), signal.SIGTERM)


def generate(root: str, overrides: list[str], rank: int) -> dict[str, Any]:
    """[given up, passes before that, passes in peace] of every rank, and whether peace brings the same afterwards."""
    with grpo(root, overrides) as built:
        calls, rollouts = [], built.stage.rollouts
        before(built.model, "hidden_states", lambda: calls.append(None))

        def samples(interrupted: Callable[[], bool] | None) -> list | None:
            calls.clear()
            try:
                return stream.generate(rollouts.engine, built.stage.data.test, 4, rollouts.sampling(0), 0, interrupted)
            except Interrupted:
                return None

        first = samples(None)
        in_peace = len(calls)
        given_up = samples(lambda: dist.get_rank() == rank and len(calls) > 4) is None
        seen: list = [None] * dist.get_world_size()
        dist.all_gather_object(seen, (given_up, len(calls), in_peace))
        return {"ranks": seen, "same": samples(lambda: False) == first is not None}


if __name__ == "__main__":
    tasks = {"run": run, "generate": generate}
    print(json.dumps([tasks[name](sys.argv[1], *rest) for name, *rest in json.loads(sys.argv[2])]))
