"""Ranks that train with an environment, and print what they saw as JSON. Usage: conversation_job.py FOLDER LAYOUT..."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from forks import free_port
from grpo_run import config_of, digest, here, step

from grpo_mega import platform
from grpo_mega.assemble import assemble
from grpo_mega.data import build_data
from grpo_mega.platform.collectives import from_main_rank
from grpo_mega.reward.compose import build_reward
from grpo_mega.run import Run
from grpo_mega.types import Rollout, Sample

# A random model samples all tokens about equally often: "=" ends a call after some ten tokens.
COUNTER = [
    *sys.argv[2:],
    "environment.path=made_environments:Counter",
    "environment.open='+'",
    "environment.close='='",
    "environment.reply='{reply}<think>'",
    "environment.max_calls=3",
    "reward.terms=[{name:environment}]",
    "reward.success=environment",
    "rollout.max_new_tokens=24",
]


@contextmanager
def run(name: str, *overrides: str) -> Iterator[Run]:
    platform.join_processes(here)
    config = config_of(name, *COUNTER, *overrides)
    reward = build_reward(config.reward, config.run.seed, config.environment.path)
    with assemble(config, here, build_data(config), reward) as built:
        built.enter(built.stages[-1])
        yield built
        os.environ["MASTER_PORT"] = str(from_main_rank(free_port))


def samples_of(built: Run, steps: int) -> tuple[list[Sample], list[dict[str, Any]]]:
    """All samples of some steps, and the metrics of these."""
    rollouts: list[Rollout] = []
    answers = built.stage.rollouts.answers

    def seen(*arguments: Any) -> Rollout:
        rollouts.append(answers(*arguments))
        gathered: list = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, rollouts[-1].samples)
        rollouts[-1] = Rollout(rollouts[-1].groups, {n: s for of_rank in gathered for n, s in of_rank.items()})
        held = gathered[dist.get_rank()]
        return Rollout(rollouts[-1].groups, held)

    built.stage.rollouts.answers = seen
    metrics = [step(built) for _ in range(steps)]
    return [rollout.samples[number] for rollout in rollouts for number in sorted(rollout.samples)], metrics


def shown(sample: Sample) -> dict[str, Any]:
    return {
        "prompt": sample.prompt.id,
        "index": sample.index,
        "ids": [*sample.token_ids],
        "given": sample.given,
        "calls": sample.calls,
        "reason": sample.finish_reason,
        "given_logprobs": sum(abs(sample.logprobs[i]) for first, end in sample.given for i in range(first, end)),
    }


def main() -> None:
    found: dict[str, Any] = {}
    for name, *more in (("whole",), ("sliced", "rollout.slice_tokens=5", "algorithm.correction=truncate")):
        with run(name, *more) as built:
            samples, metrics = samples_of(built, 3)
            tokenizer = built.stage.data.tokenizer
            found[name] = {
                "samples": [shown(sample) | {"text": tokenizer.decode(sample.token_ids)} for sample in samples],
                "mismatch": [m.get("mismatch/max_abs", 0.0) for m in metrics],
                "reward": [m["reward/mean"] for m in metrics],
                "digest": digest(built),
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
