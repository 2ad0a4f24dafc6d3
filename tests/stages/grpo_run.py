"""Runs of GRPO in one process, for jobs that drive them piece by piece; the first argument of the job is a folder."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import step_rewards
import torch
from composed import composed

from grpo_mega import platform
from grpo_mega.config.schema import Config

here = platform.start()

from grpo_mega.assemble import assemble  # noqa: E402
from grpo_mega.data import build_data  # noqa: E402
from grpo_mega.reward.compose import build_reward  # noqa: E402
from grpo_mega.rollout.stream import generate  # noqa: E402
from grpo_mega.run import Run  # noqa: E402
from grpo_mega.types import Batch, Group, Rollout, SampleInfo, Score  # noqa: E402

SMALL = [
    "experiment=tiny",
    "base=none",
    "layout=single",
    "reward.terms=[{name:own,function:step_rewards:scored},{name:format,weight:0.5}]",
    "reward.success=own",
    "data.validation_size=8",
    "data.test_size=8",
    "algorithm.prompts_per_step=4",
    "algorithm.group_size=4",
    "rollout.max_new_tokens=12",
    "optimizer.warmup_steps=0",
    "run.tensorboard=false",
    "run.steps=9",
]


root = sys.argv[1]


equal, half = Path(root, "equal"), Path(root, "half")
os.environ |= {step_rewards.EQUAL: str(equal), step_rewards.HALF: str(half)}


def config_of(name: str, *overrides: str) -> Config:
    return composed(*SMALL, f"run.root={root}", f"run.name={name}", *overrides)


@contextmanager
def grpo(name: str, *overrides: str) -> Iterator[Run]:
    """A run of GRPO with random weights that has begun, or continues in run directory `name`."""
    os.environ["MASTER_PORT"] = "0"  # any free one, for each job of this process
    platform.join_processes(here)
    config = config_of(name, *overrides)
    with assemble(config, here, build_data(config), build_reward(config.reward)) as built:
        built.enter(built.stages[-1])
        yield built


def generated(built: Run, rewards: list[tuple[float | None, ...]]) -> Rollout:
    """Real groups with given rewards; a sample with None could not be scored."""
    rollouts, prompts = built.stage.rollouts, built.stage.data.test[: len(rewards)]
    samples = generate(rollouts.engine, prompts, 4, rollouts.sampling(0), version=0)
    given = [reward for of_group in rewards for reward in of_group]
    scores = [Score(0.0, {}, unscorable="the judge was away") if r is None else Score(r, {}) for r in given]
    infos = [
        SampleInfo(len(s.token_ids), s.finish_reason, s.segments, score)
        for s, score in zip(samples, scores, strict=True)
    ]
    groups = [Group(prompt, tuple(infos[4 * i : 4 * i + 4])) for i, prompt in enumerate(prompts)]
    return Rollout(groups, dict(enumerate(samples)))


REWARDS = [(1, 0, 1, 0), (1, 1, 1, 1), (0, 0, 0, 0), (5, 5, 5, 0)]
"""Of four groups, of which two have no signal."""


def step(built: Run) -> dict[str, float]:
    record = built.stage.step(built)
    built.step += 1
    return record.metrics


def rows(batch: Batch, vector: torch.Tensor) -> list[list[float]]:
    return [part.tolist() for part in vector.split(batch.lengths.tolist())]


def digest(built: Run) -> str:
    """Of every weight, routing bias, optimizer moment and reference weight."""
    outcome = hashlib.sha256()
    for part in getattr(built.model.optimizer, "chained_optimizers", [built.model.optimizer]):
        moments = part.optimizer.state.values()
        tensors = [t for state in moments for t in state.values() if torch.is_tensor(t)]
        assert tensors, "there are no moments to compare"
        for tensor in tensors:
            outcome.update(tensor.numpy().tobytes())
    held = built.stage.reference.held if built.stage.reference else []
    for model in (built.model.chunks.state_dict(), dict(enumerate(held))):
        for tensor in model.values():
            if torch.is_tensor(tensor):
                outcome.update(tensor.detach().numpy().tobytes())
    return outcome.hexdigest()


def watched_updates(built: Run) -> list[tuple[Batch, Any]]:
    """A list that will hold every update's mini-batch and result."""
    updates, update = [], built.model.update

    def watched(mini_batch: Batch, *how: Any) -> Any:
        updates.append((mini_batch, update(mini_batch, *how)))
        return updates[-1][1]

    built.model.update = watched  # type: ignore[method-assign]
    return updates


def stopped_after_update(built: Run) -> list[tuple[Batch, Any]]:
    """Every update brings a signal. Filled as by `watched_updates`."""
    watched, update = watched_updates(built), built.model.update

    def stopped(*arguments: Any) -> Any:
        built.stop.received = "SIGTERM"
        return update(*arguments)

    built.model.update = stopped  # type: ignore[method-assign]
    return watched


WITHOUT_SIGNAL = (("drop", "drop", 0.1), ("left out", "count", 0.0), ("kl", "count", 0.1))
"""Name, `algorithm.groups_without_signal` and `algorithm.kl_coef` of all that can become of a group without signal."""
