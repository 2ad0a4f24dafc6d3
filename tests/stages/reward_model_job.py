"""One rank of runs that train a reward model; prints what it saw of each as JSON.

Usage: reward_model_job.py '[[OVERRIDES, STEPS or null, FILE or ""], ...]': runs to the end, or so many steps and a
checkpoint; then keeps the weights in the file.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any

import stage_state
import torch
import torch.distributed as dist
from composed import composed
from forks import free_port

from grpo_mega import platform

HERE = platform.start()

from grpo_mega.assemble import assemble  # noqa: E402
from grpo_mega.models.topology import leave_layout  # noqa: E402
from grpo_mega.stages.reward_model import RewardModel, scale_of  # noqa: E402
from grpo_mega.train import read  # noqa: E402


def start(overrides: list[str], steps: int | None, weights: str) -> dict[str, Any]:
    """Runs to the end, or so many steps, and keeps the weights."""
    platform.join_processes(HERE)
    config = composed(*overrides)
    seen: dict[str, Any] = {}
    try:
        with assemble(config, HERE, *read(config)) as run:
            seen["stages"], seen["resumed"] = [stage.name for stage in run.stages], run.step
            if run.step:
                seen["lost"] = stage_state.lost(answers[-1]["before"], stage_state.held(run.stage))
            if steps is None:
                run.execute()
            else:
                run.enter(run.stages[0])
                for _ in range(steps):
                    run.stage.step(run)
                    run.step += 1
                run.save()
                seen["before"] = stage_state.held(run.stage)
            groups = run.model.optimizer.param_groups if run.model.optimizer else []
            seen["weight_decay"] = sorted({group["weight_decay"] for group in groups})
            if isinstance(stage := run.stages[0], RewardModel):
                learned = [pair for step in range(stage.examples.steps) for pair in stage.examples.of_step(step)]
                seen["scale"] = asdict(scale_of(stage.model, learned, 5))
            whole = run.model.whole_weights()
            seen["head"] = float(whole["scalar_head.weight"].abs().max()) if "scalar_head.weight" in whole else None
            if weights and dist.get_rank() == 0:
                torch.save(whole, weights)
    except ValueError as error:
        seen["error"] = str(error)
        leave_layout()
    os.environ["MASTER_PORT"] = str(free_port())  # one rank alone has several runs
    return seen


if __name__ == "__main__":
    answers: list[dict[str, Any]] = []
    for task in json.loads(sys.argv[1]):
        answers.append(start(*task))
    print(json.dumps(answers))
