"""The base model: a plain language model trained on worked problems until it can solve them, then cached.

The base model can solve the problems but hardly uses the answer format, which reinforcement learning then elicits. The
ability to solve them appears suddenly, at a step that differs from seed to seed, so training ends when the model passes
a gate (an accuracy on validation problems) and not at a fixed step.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from grpo_mega.checkpoint import checkpoint
from grpo_mega.config.schema import BaseConfig, Config, OptimizerConfig
from grpo_mega.data.tasks import GeneratedTask
from grpo_mega.models.learning_rate import LearningRate
from grpo_mega.models.policy import Policy
from grpo_mega.platform.collectives import from_main_rank
from grpo_mega.rollout.engine import Engine, SamplingParams
from grpo_mega.rollout.stream import generate
from grpo_mega.run import Run, StepRecord
from grpo_mega.stages.sft import supervised_update
from grpo_mega.types import Row, Step, StreamState

RECIPE = 2
"""Version in the cache's checksum; raise it when a change of this code or of the documents changes the weights."""

LATER = ("train_", "test_path", "curriculum", "frontier_")
"""Beginnings of the names of data settings that are about what follows the base model."""


def base_path(config: Config) -> Path:
    """Folder of the cached base model of this recipe, which has everything that determines the weights."""
    data = {k: v for k, v in asdict(config.data).items() if not k.startswith(LATER)}
    base = {k: v for k, v in asdict(config.base).items() if k not in ("save_every", "max_steps")}
    recipe = [RECIPE, config.run.seed, base, asdict(config.model), data]
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
    return Path(config.run.root) / "base-models" / digest[:16]


class Pretrain:
    """A language model trained from random weights until it passes the gate, or taken from the cache."""

    name = "pretrain"
    in_progress: Step | None = None
    in_flight: StreamState | None = None

    def __init__(self, config: Config, policy: Policy, engine: Engine, task: GeneratedTask) -> None:
        """A stage that trains `policy` on `task`; `engine` generates with the weights of the policy."""
        self.config, self.base = config, config.base
        self.save_every, self.most_steps = config.base.save_every, config.base.max_steps
        self.policy = policy
        self.models = [policy]
        self.engine = engine
        self.task = task
        self.path = base_path(config)
        self.cached = False
        self.accuracies: list[float] = []
        self.passed_at: int | None = None

    def begin(self, run: Run) -> None:
        """Loads the weights from the cache, or initialises them at random."""
        self.cached = from_main_rank(self.path.is_dir)
        if self.cached:
            run.recorder.note(f"base model: from {self.path}")
            with run.phase("base"):
                checkpoint.load_weights(self.path, self.policy)
            return
        run.recorder.note(f"base model: a plain language model on {self.task.lesson}; goes to {self.path}")
        with run.timer("base"):
            self.policy.initialize(self.config.run.seed)
            self.prepare()

    def prepare(self) -> None:
        """Creates the optimizer."""
        self.policy.use_optimizer(OptimizerConfig(lr=self.base.lr, beta2=0.98, weight_decay=self.base.weight_decay))

    def is_done(self, steps: int) -> bool:
        """Whether the model is from the cache, or the learning rate has decayed to 0 after the gate was passed."""
        return self.cached or (self.passed_at is not None and steps >= self.passed_at + self.base.decay_steps)

    def step(self, run: Run) -> StepRecord:
        """One update; from `base.gate_from` on, every `base.gate_every` steps, the gate is checked.

        Raises:
            RuntimeError: The gate was not passed within `base.max_steps`.
        """
        step = run.step + 1
        with run.phase("base"):
            documents = self.task.documents(
                self.config.run.seed, step, self.base.batch_size, self.base.tagged, self.base.direct
            )
            # Warm-up, then constant, then linear decay to 0 from the step that passed the gate.
            rate = LearningRate(self.base.lr, self.base.warmup_steps)
            if self.passed_at is not None:
                rate = replace(rate, shape="wsd", begins=self.passed_at, decay=self.base.decay_steps)
            rows = [Row(ids, ((1, len(ids)),)) for ids in documents]
            metrics = supervised_update(self.policy, rows, rate.at(update=step - 1, step=step - 1)).metrics
            gate_is_due = step >= self.base.gate_from and (step - self.base.gate_from) % self.base.gate_every == 0
            if self.passed_at is None and gate_is_due:
                # Greedy, in the untagged format with the beginning of the working given.
                prompts = [self.task.working_prompt(p) for p in self.task.validation]
                longest, stops = self.config.rollout.max_new_tokens, (self.task.tokenizer.eos_id,)
                sampling = SamplingParams(max_new_tokens=longest, stop_ids=stops).greedy()
                samples = generate(self.engine, prompts, 1, sampling, version=0)
                correct = [s.finish_reason == "stop" and self.task.is_worked_out(s.prompt, s.text) for s in samples]
                accuracy = sum(correct) / len(samples)
                self.accuracies.append(accuracy)
                run.recorder.evaluation(step, "base model", {"loss": metrics["loss"], "working_accuracy": accuracy})
                metrics["working_accuracy"] = accuracy
                if gate_is_passed(self.accuracies, self.base):
                    self.passed_at = step
        if self.passed_at is None and step >= self.base.max_steps:
            raise RuntimeError(
                f"the base model did not reach base.gate_accuracy={self.base.gate_accuracy} in base.gate_passes="
                f"{self.base.gate_passes} checks in a row within base.max_steps={self.base.max_steps} (last loss "
                f"{metrics['loss']:.3f}); raise base.max_steps or change base.lr"
            )
        return StepRecord({f"base/{name}": value for name, value in metrics.items()})

    def end(self, run: Run) -> None:
        """Saves the model in the cache."""
        self.policy.optimizer = None
        # So that the next stage is the same whether the model was trained now or comes from the cache.
        self.policy.updates = 0
        if self.cached or from_main_rank(self.path.is_dir):
            return
        # Other runs may train the same model at the same time: each writes a folder, and the first renames it.
        written = self.path.with_name(f"{self.path.name}-{self.config.run.name}")
        if self.policy.topology.is_main:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        # The configuration, from which the model is exported, without settings that do not affect it.
        config = {name: section for name, section in asdict(self.config).items() if name not in ("layout", "cluster")}
        config |= {"run": {"name": "base-model", "steps": self.config.run.steps, "seed": self.config.run.seed}}
        with run.timer("checkpoint"):
            checkpoint.save(written, self.models, {"steps": run.step, "config": config})
        if self.policy.topology.is_main:
            if self.path.is_dir():
                shutil.rmtree(written)
            else:
                written.rename(self.path)

    def progress(self, step: int) -> str:
        """An empty text: steps of this stage are never stopped half-way."""
        return ""

    def state_dict(self) -> dict[str, Any]:
        """Accuracies measured by the gate, and the step that passed it."""
        return {"accuracies": self.accuracies, "passed_at": self.passed_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state of `state_dict`."""
        self.accuracies, self.passed_at = state["accuracies"], state["passed_at"]


def gate_is_passed(accuracies: list[float], base: BaseConfig) -> bool:
    """Whether the last `gate_passes` of all measured accuracies reached the gate."""
    last = accuracies[-base.gate_passes :]
    return len(last) == base.gate_passes and min(last) >= base.gate_accuracy
