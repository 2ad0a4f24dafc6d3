"""One rank of runs that learn a file of chats and then take one GRPO step; prints what it saw as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import stage_state
import torch
import torch.distributed as dist
from composed import composed
from forks import free_port

from grpo_mega import platform

HERE = platform.start()

from grpo_mega.assemble import assemble  # noqa: E402
from grpo_mega.data import build_data  # noqa: E402
from grpo_mega.platform.collectives import from_main_rank  # noqa: E402
from grpo_mega.reward.compose import build_reward  # noqa: E402


def start(overrides: list[str], steps: int | None, weights: str) -> dict[str, Any]:
    """Runs to the end, or so many supervised steps, and keeps the weights after the last of these."""
    platform.join_processes(HERE)
    config = composed(*overrides)
    seen: dict[str, Any] = {}
    try:
        with assemble(config, HERE, build_data(config), build_reward(config.reward)) as run:
            sft, grpo = run.stages
            seen["stages"], seen["resumed"] = [stage.name for stage in run.stages], run.step
            if run.step:
                seen["lost"] = stage_state.lost(answers[-1]["before"], stage_state.held(sft))
            if steps is None:
                begin = grpo.begin

                def kept(*arguments: Any) -> None:
                    keep(run.model.whole_weights(), weights)
                    begin(*arguments)

                grpo.begin = kept  # type: ignore[method-assign]
                run.execute()
                seen["moved"] = moved(run.model.whole_weights(), weights)
            else:
                run.enter(sft)
                for _ in range(steps):
                    sft.step(run)
                    run.step += 1
                run.save()
                seen["before"] = stage_state.held(sft)
    except ValueError as error:
        seen["error"] = str(error)
    os.environ["MASTER_PORT"] = str(from_main_rank(free_port)) if dist.is_initialized() else "0"
    return seen


def keep(whole: dict[str, torch.Tensor], weights: str) -> None:
    if dist.get_rank() == 0:
        torch.save(whole, weights)
    dist.barrier()


def moved(whole: dict[str, torch.Tensor], weights: str) -> bool:
    before = torch.load(weights)
    return any(not torch.equal(before[name], tensor) for name, tensor in whole.items())


if __name__ == "__main__":
    answers = []
    for overrides, steps, weights, append in json.loads(sys.argv[1]):
        if append and int(os.environ["RANK"]) == 0:
            with Path(append).open("a") as file:
                file.write('{"prompt": "What is 9+5?", "completion": "15"}\n')
        answers.append(start(overrides, steps, weights))
    print(json.dumps(answers))
