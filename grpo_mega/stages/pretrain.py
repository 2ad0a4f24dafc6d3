"""The base model: a plain language model trained on worked arithmetic until it can calculate, then cached.

It knows how to calculate but hardly the answer format; what reinforcement learning then does is elicit. Learning to
calculate is a phase change at a step that differs from seed to seed, so training ends at a competence gate and not
at a fixed step.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from grpo_mega.checkpoint import checkpoint
from grpo_mega.config.schema import BaseConfig, Config, OptimizerConfig
from grpo_mega.data import Data
from grpo_mega.data.tasks.chain_sum import ChainSum, working_answer
from grpo_mega.models.optimizer import warmed_up
from grpo_mega.models.policy import Policy
from grpo_mega.platform.collectives import main_says
from grpo_mega.rollout.engine import Engine, SamplingParams
from grpo_mega.stages.sft import supervised_update

RECIPE = 2
"""Part of the checksum; raise it when the code below, or the documents, change what is learned."""


def base_path(config: Config) -> Path:
    """Where the base model of this recipe is cached; the layout is not part of the recipe."""
    data = {k: v for k, v in asdict(config.data).items() if not k.endswith("_path")}
    recipe = [RECIPE, config.run.seed, asdict(config.base), asdict(config.model), data]
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
    return Path(config.run.root) / "base-models" / digest[:16]


def load_or_train_base(
    config: Config, policy: Policy, engine: Engine, data: Data, report: Callable[[int, dict[str, float]], None]
) -> None:
    """Gives the policy the base model's weights, from the cache when they are there.

    `report(step, metrics)` is called at every gate check.

    Raises:
        RuntimeError: The gate was not passed within `base.max_steps`.
    """
    path = base_path(config)
    if main_says(path.is_dir):
        checkpoint.load_weights(path, policy)
        return
    assert data.chain_sum is not None, "rules.py refuses base.train without data.task=chain_sum"
    policy.initialize(config.run.seed)
    steps = _train(config.base, config.run.seed, policy, engine, data.chain_sum, config.rollout.max_new_tokens, report)
    policy.optimizer = None
    mine = path.with_name(f"{path.name}-{config.run.name}")  # another run may be training the same base model
    if policy.topology.is_main:
        path.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.save(mine, policy, {"steps": steps})
    if policy.topology.is_main:
        if path.is_dir():
            shutil.rmtree(mine)
        else:
            mine.rename(path)


def _train(
    base: BaseConfig,
    seed: int,
    policy: Policy,
    engine: Engine,
    task: ChainSum,
    longest: int,
    report: Callable[[int, dict[str, float]], None],
) -> int:
    """Trains until the gate is passed, then lets the learning rate fall to 0; the number of steps.

    `longest` bounds the answers of the gate, in tokens.
    """
    policy.use_optimizer(OptimizerConfig(lr=base.lr, beta2=0.98, weight_decay=base.weight_decay))

    def learn(step: int, lr: float) -> float:
        documents = task.documents(seed, step, base.batch_size, base.tagged, base.direct)
        return supervised_update(policy, [(ids, 1) for ids in documents], lr).metrics["loss"]

    accuracies: list[float] = []
    for step in range(1, base.max_steps + 1):
        loss = learn(step, warmed_up(base.lr, base.warmup_steps, step - 1))
        if step >= base.gate_from and (step - base.gate_from) % base.gate_every == 0:
            accuracies.append(_working_accuracy(engine, task, longest))
            report(step, {"loss": loss, "working_accuracy": accuracies[-1]})
            if gate_is_passed(accuracies, base):
                break
    else:
        raise RuntimeError(
            f"the base model did not reach base.gate_accuracy={base.gate_accuracy} in base.gate_passes="
            f"{base.gate_passes} checks in a row within base.max_steps={base.max_steps} (last loss {loss:.3f}); "
            "raise base.max_steps or change base.lr"
        )
    for decay in range(base.decay_steps):
        learn(step + 1 + decay, base.lr * (1 - decay / base.decay_steps))
    return step + base.decay_steps


def gate_is_passed(accuracies: list[float], base: BaseConfig) -> bool:
    """Whether the last `gate_passes` of all checks so far, the latest at the end, reached the gate."""
    last = accuracies[-base.gate_passes :]
    return len(last) == base.gate_passes and min(last) >= base.gate_accuracy


def _working_accuracy(engine: Engine, task: ChainSum, longest: int) -> float:
    """Greedy accuracy of untagged working, started with the first sum, on the validation problems."""
    prompts = [task.working_prompt(p) for p in task.validation]
    sampling = SamplingParams(max_new_tokens=longest, stop_ids=(task.tokenizer.eos_id,)).greedy()
    samples = engine.generate(prompts, 1, sampling, version=0)
    right = [s.finish_reason == "stop" and working_answer(s.text) == s.prompt.answer for s in samples]
    return sum(right) / len(samples)
