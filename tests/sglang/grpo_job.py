"""A GRPO run of one rank on SGLang whose engine is killed while it generates; prints what the run saw as JSON.

Usage: grpo_job.py FOLDER embedded|sglang
"""

from __future__ import annotations

import json
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from grpo_mega import platform
from grpo_mega.config.load import compose_config

HERE = platform.start()

from metric_lines import of_steps  # noqa: E402
from on_cuda import TINY  # noqa: E402

from grpo_mega.assemble import assemble  # noqa: E402
from grpo_mega.colocation.colocation import Colocation  # noqa: E402
from grpo_mega.colocation.lease import State  # noqa: E402
from grpo_mega.data import build_data  # noqa: E402
from grpo_mega.reward.compose import build_reward  # noqa: E402
from grpo_mega.run import Run  # noqa: E402

RUN = [
    "experiment=tiny_sglang",
    "base=none",
    "layout=single",
    "reward.terms=[{name:own,function:sglang_rewards:sevens}]",
    "reward.success=own",
    "data.validation_size=8",
    "data.test_size=16",
    "algorithm.prompts_per_step=8",
    "algorithm.group_size=8",
    "algorithm.kl_coef=0.01",
    "rollout.max_new_tokens=12",
    "optimizer.lr=3e-3",
    "optimizer.warmup_steps=0",
    "run.tensorboard=false",
    "run.steps=8",
    "run.eval_every=4",
    "run.save_every=0",
]
KILLED_IN_STEP = 3


def killing(built: Run, colocation: Colocation) -> Callable[[], bool]:
    """In place of `StopRequest.asked`: kills what computes in the engine once, in the middle of a generation."""
    asked, processes = built.stop.asked, [psutil.Process(pid) for pid in built.stage.rollouts.engine.pids()]
    schedulers = [p for p in processes if "scheduler" in " ".join(p.cmdline())]

    def asked_and_killed() -> bool:
        if built.step == KILLED_IN_STEP and colocation.lease.state is State.GENERATING and schedulers:
            schedulers.pop().send_signal(signal.SIGKILL)
        return asked()

    return asked_and_killed


def main() -> None:
    folder, engine, *own = sys.argv[1:]
    platform.join_processes(HERE)  # not above: the helpers that write checkpoints import this file
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    overrides = [f"rollout.engine={engine}", *(["rollout.sglang.verify_every=1"] if engine == "sglang" else [])]
    config = compose_config([*RUN, *overrides, *TINY, f"run.root={folder}", f"run.name={engine}", *own])
    with assemble(config, HERE, build_data(config), build_reward(config.reward)) as built:
        logging.getLogger("grpo_mega").addHandler(handler)
        if engine == "sglang":
            built.stop.asked = killing(built, built.stage.rollouts.access)  # type: ignore[method-assign]
        built.execute()
        colocation = built.stage.rollouts.access.post_mortem() if engine == "sglang" else None
    metrics = of_steps(Path(folder) / config.run.name)
    left = [" ".join(p.cmdline()) for p in psutil.Process().children(recursive=True)]
    print(json.dumps({"metrics": metrics, "warnings": warnings, "colocation": colocation, "left": left}))


if __name__ == "__main__":
    main()
