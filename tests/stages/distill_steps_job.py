"""One rank that drives real runs of on-policy distillation, piece by piece, and prints what it saw as JSON.

Usage: distill_steps_job.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import stage_state
import torch
from composed import composed
from forks import free_port

from grpo_mega import platform

here = platform.start()

from grpo_mega.assemble import assemble  # noqa: E402
from grpo_mega.checkpoint import checkpoint  # noqa: E402
from grpo_mega.data import build_data  # noqa: E402
from grpo_mega.models.policy import Policy  # noqa: E402
from grpo_mega.reward.compose import build_reward  # noqa: E402
from grpo_mega.run import Run  # noqa: E402
from grpo_mega.stages.distill import Distill, with_teacher  # noqa: E402

TEMPERATURE = 1.3
SMALL = [
    "base=none",
    "layout=single",
    "data.validation_size=8",
    "data.test_size=8",
    "rollout.max_new_tokens=12",
    f"rollout.temperature={TEMPERATURE}",
    "optimizer.warmup_steps=0",
    "run.tensorboard=false",
    "run.steps=9",
    "run.eval_every=0",
]
TEACHER = ["experiment=tiny", *SMALL, "run.name=teacher", "model.init_std=0.2"]
STUDENT = [
    "experiment=tiny_distill",
    *SMALL,
    "reward.terms=[{name:length,function:distill_rewards:none_of_some}]",
    "reward.success=length",
    "reward.on_error=leave_out",
    "algorithm.prompts_per_step=8",
    "algorithm.mini_batches=2",
    "distill.coef=0.5",
]


@contextmanager
def begun(folder: str, words: list[str]) -> Iterator[Run]:
    """A run that has begun, or continues."""
    platform.join_processes(here)
    config = composed(*words, f"run.root={folder}")
    with assemble(config, here, build_data(config), build_reward(config.reward)) as built:
        built.enter(built.stages[-1])
        yield built
        os.environ["MASTER_PORT"] = str(free_port())


def saved_teacher(folder: str, words: list[str], factor: float) -> None:
    """Saves a model whose weights no seed gives, as a run with a checkpoint."""
    with begun(folder, words) as built, torch.no_grad():
        for parameter in built.model.chunks.parameters():
            parameter.mul_(factor)
        built.save()


def steps(folder: str) -> dict[str, Any]:
    """Steps of a student whose teacher has another architecture, and the columns of the batch that follows."""
    seen: dict[str, Any] = {"steps": []}
    with begun(folder, [*STUDENT, "run.name=student"]) as built:
        stage = built.stages[-1]
        assert isinstance(stage, Distill)
        of_teacher = stage.teacher.whole_weights()
        of_teacher = {key: weight.clone() for key, weight in of_teacher.items()}
        for _ in range(3):
            before = {key: weight.clone() for key, weight in stage.policy.whole_weights().items()}
            metrics = stage.step(built).metrics
            built.step += 1
            after = stage.policy.whole_weights()
            moved = max(float((after[key] - weight).abs().max()) for key, weight in before.items())
            seen["steps"].append({"metrics": metrics, "moved": moved})
        still = stage.teacher.whole_weights()
        seen["still"] = all(torch.equal(weight, still[key]) for key, weight in of_teacher.items())
        current = stage.experience(built)
        batch = current.batch
        assert batch is not None
        lengths = batch.lengths.tolist()
        columns = {name: column for name, column in batch.columns().items() if name != "experts"}
        seen["columns"] = {name: [part.tolist() for part in column.split(lengths)] for name, column in columns.items()}
        alone = Policy(stage.teacher.architecture, built_layout(), stage.teacher.vocab_size, stage.topology, here)
        checkpoint.load_weights(Path(folder) / "teacher/checkpoints/step-000000", alone)
        seen["teacher alone"] = [part.tolist() for part in alone.logprobs(batch, TEMPERATURE).split(lengths)]
        seen["policy alone"] = [part.tolist() for part in stage.policy.logprobs(batch, TEMPERATURE).split(lengths)]
        made_up = batch.with_(advantage=torch.sin(torch.arange(len(batch.tokens))))
        rewarded = with_teacher(made_up, stage.teacher, replace(stage.distill, reward_coef=2.0), TEMPERATURE)
        seen["made up"] = [part.tolist() for part in made_up.advantage.split(lengths)]
        seen["rewarded"] = [part.tolist() for part in rewarded.advantage.split(lengths)]
        seen["unscorable"] = sum(bool(a.score.unscorable) for group in current.groups for a in group.infos)
        stage.in_progress = current
        seen["metrics"] = stage.step(built).metrics
        built.step += 1
        built.save()
        newest = Path(folder) / "student/checkpoints/step-000004"
        seen["saved"] = sorted(path.name for path in newest.iterdir())
        seen["state"] = json.loads((newest / "state.json").read_text())["stage"]["teacher"]
        seen["teacher's"] = stage.teacher.checksum
        before = stage_state.held(stage)
    with begun(folder, [*STUDENT, "run.name=student"]) as built:
        seen["lost"] = stage_state.lost(before, stage_state.held(built.stage))
    return seen


def built_layout():
    return composed(*STUDENT).layout


def own_teacher(folder: str) -> dict[str, float]:
    """The first step of a student that has its teacher's weights."""
    start = f"run.init_from={folder}/teacher/checkpoints/step-000000"
    words = [word for word in TEACHER if not word.startswith("run.name")]
    teacher = [f"distill.teacher={folder}/teacher", start, "run.name=own"]
    with begun(folder, [*words, *teacher, "algorithm.prompts_per_step=8"]) as built:
        return built.stage.step(built).metrics


def other_teacher(folder: str) -> str:
    """What a run says that continues when its teacher's run has gone on."""
    saved_teacher(folder, [word for word in TEACHER if "teacher" not in word] + ["run.name=other"], 1.2)
    os.rename(f"{folder}/teacher/checkpoints", f"{folder}/teacher/before")
    os.rename(f"{folder}/other/checkpoints", f"{folder}/teacher/checkpoints")
    try:
        with begun(folder, [*STUDENT, "run.name=student"]):
            return "accepted"
    except ValueError as error:
        return str(error)


if __name__ == "__main__":
    saved_teacher(sys.argv[1], TEACHER, 1.1)
    found = steps(sys.argv[1])
    found["own"] = own_teacher(sys.argv[1])
    found["other"] = other_teacher(sys.argv[1])
    print(json.dumps(found))
