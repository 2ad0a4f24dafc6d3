"""One rank that drives a real run of PPO, piece by piece, and prints what it saw as JSON."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from typing import Any

import stage_state
import torch
from composed import composed

from grpo_mega import platform

here = platform.start()

from grpo_mega.assemble import assemble  # noqa: E402
from grpo_mega.data import build_data  # noqa: E402
from grpo_mega.reward.compose import build_reward  # noqa: E402
from grpo_mega.stages.ppo import PPO, with_critic  # noqa: E402

RUN = [
    "experiment=tiny_ppo",
    "base=none",
    "layout=single",
    "reward.terms=[{name:length,function:ppo_rewards:by_length}]",
    "reward.success=length",
    "data.validation_size=8",
    "data.test_size=8",
    "algorithm.prompts_per_step=8",
    "algorithm.group_size=1",
    "algorithm.mini_batches=2",
    "algorithm.kl_in=reward",
    "algorithm.kl_coef=0.1",
    "critic.gamma=0.99",
    "critic.lam=0.8",
    "critic.lr=0.002",
    "critic.clip=0.3",
    "critic.alone_steps=1",
    "rollout.max_new_tokens=12",
    "optimizer.warmup_steps=5",
    "run.tensorboard=false",
    "run.steps=9",
    "run.eval_every=0",
    "run.name=ppo",
]


def weights(stage: PPO) -> dict[str, dict[str, torch.Tensor]]:
    """Copies of all weights of policy and critic."""
    return {
        model.role: {k: w.clone() for k, w in model.whole_weights().items()} for model in (stage.policy, stage.critic)
    }


def moved(before: dict[str, dict[str, torch.Tensor]], after: dict[str, dict[str, torch.Tensor]]) -> dict[str, float]:
    """The largest change of any weight of each model."""
    return {
        role: max(float((after[role][key] - weight).abs().max()) for key, weight in of_role.items())
        for role, of_role in before.items()
    }


def main() -> None:
    platform.join_processes(here)
    config = composed(*RUN, f"run.root={sys.argv[1]}")
    seen: dict[str, Any] = {"steps": []}
    with assemble(config, here, build_data(config), build_reward(config.reward)) as built:
        stage = built.stages[-1]
        assert isinstance(stage, PPO)
        built.enter(stage)
        bodies = weights(stage)
        fresh = stage_state.held(stage.state_dict())
        seen["body"] = all(
            torch.equal(weight, bodies["policy"][key])
            for key, weight in bodies["critic"].items()
            if "scalar_head" not in key
        )
        for _ in range(4):
            before = weights(stage)
            record = stage.step(built)
            built.step += 1
            seen["steps"].append({"moved": moved(before, weights(stage)), "metrics": record.metrics})
        current = stage.experience(built)
        batch = current.batch
        assert batch is not None
        columns = {name: column for name, column in batch.columns().items() if name != "experts"}
        lengths = batch.lengths.tolist()
        seen["columns"] = {name: [part.tolist() for part in column.split(lengths)] for name, column in columns.items()}
        seen["values"] = [part.tolist() for part in stage.critic.values(batch).split(lengths)]
        scores = [info.score.total for group in current.groups for info in group.infos]
        ends = batch.cu_seqlens[1:] - 1
        others = batch.with_(tokens=batch.tokens.index_fill(0, ends, 0))
        seen["values with another last token"] = [part.tolist() for part in stage.critic.values(others).split(lengths)]
        seen["clip"] = stage.critic_loss.clip
        plain = replace(config.algorithm, advantage_std="none")
        advantage = with_critic(batch, scores, stage.critic, plain, config.critic).advantage
        seen["not whitened"] = [part.tolist() for part in advantage.split(lengths)]
        seen["scores"] = [scores[number] for number in batch.numbers.tolist()]
        built.save()
        before = stage_state.held(stage)
        seen["unmoved"] = stage_state.unmoved(stage_state.held(stage.state_dict()), fresh)
    os.environ["MASTER_PORT"] = "0"
    platform.join_processes(here)
    with assemble(config, here, build_data(config), build_reward(config.reward)) as built:
        seen["lost"] = stage_state.lost(before, stage_state.held(built.stages[-1]))
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
