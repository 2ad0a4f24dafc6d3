"""The loop of GRPO, step by step as in the paper (DeepSeekMath, arXiv 2402.03300, algorithm 1).

The formulas of an update (ratio, clip, KL) are in `kernels/grpo_kernels/token_loss.py`, the token weights in
`grpo_mega/algorithm/weights.py`. `rollouts.py` turns prompts into scored samples, `step.py` turns samples into batches
of updates, and `step_report.py` says what came of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grpo_mega.config.schema import OptimizerConfig, RunConfig
from grpo_mega.data import Data
from grpo_mega.models.learning_rate import Schedule
from grpo_mega.models.policy import Policy
from grpo_mega.models.reference import ReferencePolicy
from grpo_mega.run import Metrics, Run, Saved, StepRecord, is_due
from grpo_mega.stages.rollouts import Rollouts
from grpo_mega.stages.step import (
    batch_of_all,
    batch_of_step,
    batch_of_update,
    corrected,
    loss_of,
    penalised,
    step_of,
    with_newest,
)
from grpo_mega.stages.step_report import Watch, achieved, with_numbers
from grpo_mega.types import Batch, Step, StreamState


@dataclass(frozen=True)
class StageParts:
    """What GRPO, and the stages that vary its loop, are made of.

    Attributes:
        run, optimizer: Sections of the configuration.
        policy: The model that learns.
        reference: The policy that the KL term refers to; None without the term.
        data: The problems.
        rollouts: Generates and scores samples.
        watch: Metrics and warnings of the steps.
    """

    run: RunConfig
    optimizer: OptimizerConfig
    policy: Policy
    reference: ReferencePolicy | None
    data: Data
    rollouts: Rollouts
    watch: Watch


class GRPO:
    """Reinforcement learning of the policy on completions that can be scored."""

    name = "grpo"

    def __init__(self, parts: StageParts) -> None:
        self.optimizer, self.policy, self.topology = parts.optimizer, parts.policy, parts.policy.topology
        self.reference, self.data, self.rollouts, self.watch = parts.reference, parts.data, parts.rollouts, parts.watch
        self.options = options = parts.rollouts.options
        self.algorithm, self.temperature = options.algorithm, options.rollout.temperature
        self.save_every, self.eval_every, self.most_steps = parts.run.save_every, parts.run.eval_every, parts.run.steps
        self.copies = [copy for copy in (parts.reference, parts.rollouts.average) if copy]
        self.models: list[Saved] = [parts.policy, *self.copies]
        self.skips_old_pass = options.skips_old_pass
        self.loss = loss_of(self.algorithm, self.skips_old_pass)
        self.in_progress: Step | None = None
        updates_per_step = self.algorithm.epochs * self.algorithm.mini_batches
        self.schedule = Schedule(parts.optimizer, parts.run.steps, updates_per_step)
        self.before: Metrics = {}

    def step(self, run: Run) -> StepRecord:
        """One iteration, or the rest of the one in progress."""
        if self.in_progress is None:
            with run.undone_if_stopped(self.data.train, self.rollouts):
                self.in_progress = self.experience(run)
        current = self.in_progress
        # A step that was stopped, or resumed from a checkpoint, goes on after the updates that it has done.
        for mini_batch in current.mini_batches[len(current.updates) :]:
            with run.phase("update"):
                self.update(current, batch_of_update(current, mini_batch, self.options, run.step), run.step)
        self.rollouts.join()  # waits for a slice that engines generate during the updates
        # Before the step counts: an evaluation that is interrupted is repeated.
        metrics = self.evaluated(run)
        self.watch.count(current)
        metrics |= self.watch.metrics(current, self.policy, self.schedule) | self.rollouts.traffic()
        self.in_progress = None
        if self.reference and is_due(self.algorithm.reference_refresh, run.step + 1):
            self.reference.refresh()  # pi_ref <- pi_theta
        return StepRecord(metrics, with_numbers(current, self.options, self.topology), current.loads)

    def experience(self, run: Run) -> Step:
        """The data for the updates of a step: questions, groups of samples, rewards, advantages, log-probs."""
        rollout = self.rollouts.next(run, self.data.train.take)  # q ~ P(Q), o_i ~ pi_old, r_i
        self.data.train.learn(rollout.groups)  # a curriculum: which problems to draw
        # Which groups have signal, and the mini-batches.
        current = step_of(rollout.groups, self.options, run.step, self.policy.updates)
        current.shown_groups, current.shown = self.rollouts.shown(rollout, current.signal, run.step)
        with run.phase("logprobs"):
            batch = batch_of_step(rollout, current, self.options, self.topology)  # A_i = (r_i - mean(r)) / std(r)
            if batch is None:  # nothing to learn, but the mismatch of engine and trainer is measured at every step
                everything = batch_of_all(rollout, self.options.exchange, self.topology)
                self.watch.compare(current, everything, self.policy)
                return current
            # Frees the samples: the batch has all that the passes below read. (`Rollout` is frozen, its dict is not.)
            rollout.samples.clear()
            if self.reference:  # log pi_ref, for the KL term
                batch = batch.with_(ref_logprob=self.reference.logprobs(batch, self.temperature))
        with run.phase("logprobs"):
            if not self.skips_old_pass:  # log pi_old, unless the step's only update computes it itself
                batch = batch.with_(old_logprob=self.policy.logprobs(batch, self.temperature))
                batch = corrected(batch, self.algorithm, self.topology)  # by sequences; by tokens in the loss
            # A KL term in the rewards changes the advantages.
            current.batch = penalised(batch, rollout.groups, self.options, self.topology)
        return current

    def update(self, current: Step, batch: Batch, step: int) -> None:
        """One optimizer update on the GRPO objective (equation 3), weighted over the global mini-batch."""
        result = self.policy.update(batch, self.loss, self.schedule.next(step), self.temperature)
        self.rollouts.follow()  # an average of the weights, for evaluations
        self.watch.tokens["trained"] += result.tokens
        current.loads = {str(layer): load for layer, load in result.expert_loads.items()}
        current.updates.append(result.metrics)
        if current.batch is not None and current.shown_groups:
            current.batch = with_newest(current.batch, batch, result.outputs, result.entropies)
        if current.batch is not None and self.skips_old_pass:
            current.batch = current.batch.with_(old_logprob=result.outputs)

    def evaluated(self, run: Run) -> Metrics:
        """Metrics on the validation problems, if an evaluation is due after this step."""
        if not is_due(self.eval_every, run.step + 1):
            return {}
        return self.watch.evaluated(self.rollouts.evaluate(run, "validation", self.data.validation, run.step + 1))

    def begin(self, run: Run) -> None:
        """Starts from the policy's current weights, which are copied to the reference."""
        self.prepare()
        for copy in self.copies:
            copy.refresh()
        self.before = self.rollouts.evaluate(run, "held-out", self.data.test, 0)

    def prepare(self) -> None:
        """Creates the optimizer."""
        self.policy.use_optimizer(self.optimizer)

    def is_done(self, steps: int) -> bool:
        """Whether the stage ends after `steps` steps; a step in progress is finished first."""
        return steps >= self.most_steps and self.in_progress is None

    def end(self, run: Run) -> None:
        """Evaluates on the held-out problems, and records the result of the run."""
        after = self.rollouts.evaluate(run, "held-out", self.data.test, run.step) if run.step else self.before
        tokens = {f"tokens_{kind}": n for kind, n in self.watch.tokens.items()}
        problems = {"held_out_problems": len(self.data.test)} if after else {}
        # Samples that outlive steps outlive the last one too: they stay in the last checkpoint.
        outlive = self.rollouts.slices.outlive_steps
        waiting = {"samples_in_flight": self.rollouts.samples_in_flight()} if outlive else {}
        run.finish(achieved(self.before if run.step else {}, after) | problems | tokens | waiting)

    @property
    def in_flight(self) -> StreamState | None:
        """The samples that later steps take; None where no sample outlives its step."""
        return self.rollouts.in_flight if self.rollouts.slices.outlive_steps else None

    @in_flight.setter
    def in_flight(self, state: StreamState | None) -> None:
        self.rollouts.resume(state or StreamState())

    def progress(self, step: int) -> str:
        """Progress within the step in progress (updates done), in words; empty between two steps."""
        if self.in_progress is None:
            return ""
        return f"after {len(self.in_progress.updates)} of {len(self.in_progress.mini_batches)} updates"

    def state_dict(self) -> dict[str, Any]:
        """Counters, position in the order of prompts, and the evaluation before training."""
        return {
            "schedule": self.schedule.state_dict(),
            "before": self.before,
            "watch": self.watch.state_dict(),
            "prompts": self.data.train.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state of `state_dict`. Raises InputError when the schedule has changed since."""
        self.schedule.load_state_dict(state["schedule"])
        self.before = state["before"]
        self.watch.load_state_dict(state["watch"])
        self.data.train.load_state_dict(state["prompts"])
