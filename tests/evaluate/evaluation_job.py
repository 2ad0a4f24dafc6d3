"""Evaluates a policy with random weights as training does; started by run_ranks. Usage: evaluation_job.py FOLDER.

Rank 0 prints what it saw as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from composed import composed
from forks import free_port

from grpo_mega import platform

HERE = platform.start()

from grpo_mega.assemble import assemble  # noqa: E402
from grpo_mega.data import build_data  # noqa: E402
from grpo_mega.evaluate.votes import Ballot, answer_numbers, votes_of  # noqa: E402
from grpo_mega.platform.collectives import from_all_ranks, from_main_rank  # noqa: E402
from grpo_mega.platform.stop import Interrupted, StopRequest  # noqa: E402
from grpo_mega.reward.compose import build_reward  # noqa: E402
from grpo_mega.run import Run  # noqa: E402
from grpo_mega.types import Sample, Score  # noqa: E402

SMALL = [
    "experiment=tiny",
    "base=none",
    "reward.terms=[{name: exact, options: {read: text}}, {name: format, weight: 0.5}]",
    "reward.success=exact",
    "data.validation_size=9",
    "data.test_size=8",
    "rollout.max_new_tokens=12",
    "run.tensorboard=false",
    "run.steps=9",
]

VALUED = "reward.terms=[{name:own,function:evaluation_rewards:varied}]"


@contextmanager
def built(folder: str, name: str, *overrides: str) -> Iterator[Run]:
    """A run with random weights that has begun."""
    platform.join_processes(HERE)
    layout = "layout=ep2" if dist.get_world_size() > 1 else "layout=single"
    config = composed(*SMALL, layout, f"run.root={folder}", f"run.name={name}", *overrides)
    with assemble(config, HERE, build_data(config), build_reward(config.reward)) as run:
        run.enter(run.stages[-1])
        yield run
        os.environ["MASTER_PORT"] = str(from_main_rank(free_port))


def length_and_parity(sample: Sample) -> str | None:
    """An answer that nearly every completion has, and that few share; none for those that end early."""
    return f"{len(sample.token_ids)} {sample.token_ids[0] % 2}" if len(sample.token_ids) > 2 else None


def evaluated(folder: str, name: str, samples: int, *overrides: str) -> dict[str, Any]:
    """The metrics of an evaluation, and the completions that it was about."""
    with built(folder, name, f"eval.samples={samples}", *overrides) as run:
        rollouts, problems = run.stage.rollouts, run.stage.data.validation
        metrics = rollouts.evaluate(run, "validation", problems, 3)
        rollout = rollouts.produced(run, "evaluate", problems, samples, 3)
        held = from_all_ranks(lambda: rollout.samples)
        numbered = {number: sample for of_rank in held for number, sample in of_rank.items()}
        drawn = [numbered[number] for number in sorted(numbered)]
        ballot = Ballot(length_and_parity, lambda one, other: one[-1] == other[-1])
        votes = votes_of(rollout, ballot)
        alone = [
            answer_numbers([ballot.read(sample) for sample in drawn[first : first + samples]], ballot.same)
            for first in range(0, len(drawn), samples)
        ]
        return {
            "metrics": metrics,
            "tokens": [[*sample.token_ids] for sample in drawn],
            "scores": [info.score.terms for info in rollout.infos],
            "votes": votes,
            "votes_alone": alone,
        }


def stopped(folder: str) -> dict[str, Any]:
    """What an evaluation gives that was asked to stop when its samples were scored, the second time."""
    with built(folder, "stopped", "eval.samples=4") as run:
        run.stop.listen()
        rollouts, problems = run.stage.rollouts, run.stage.data.validation
        score, before = rollouts.score, random.getstate()

        def score_and_signal(samples: Sequence[Sample]) -> Sequence[Score]:
            os.kill(os.getpid(), signal.SIGTERM)
            random.random()
            return score(samples)

        rollouts.score = score_and_signal
        try:
            rollouts.evaluate(run, "validation", problems, 3)
            interrupted = False
        except Interrupted:
            interrupted = True
        rollouts.score, run.stop = score, StopRequest()
        undone = random.getstate() == before
        again = rollouts.evaluate(run, "validation", problems, 3)
        return {"interrupted": interrupted, "undone": undone, "metrics": again}


if __name__ == "__main__":
    folder = sys.argv[1]
    seen = {
        "one": evaluated(folder, "one", 1),
        "four": evaluated(folder, "four", 4),
        "valued": evaluated(folder, "valued", 4, VALUED, "reward.success=own"),
        "greedy": evaluated(folder, "greedy", 4, "eval.temperature=0"),
        "narrow": evaluated(folder, "narrow", 4, "eval.top_p=0.01"),
    }
    print(json.dumps(seen | {"stopped": stopped(folder)}))
