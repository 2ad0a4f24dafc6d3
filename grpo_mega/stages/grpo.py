"""GRPO, step by step, as the paper has it (DeepSeekMath, arXiv 2402.03300, algorithm 1). This file is the loop.

What an update minimises, with ratio, clip and KL, is in `grpo_mega/models/losses.py`; what a token counts in it in
`grpo_mega/algorithm/weights.py`. `rollouts.py` makes scored answers of prompts, `batches.py` mini-batches of answers.
"""

from __future__ import annotations

from typing import Any

from grpo_mega.checkpoint.step_in_progress import StepInProgress
from grpo_mega.config.schema import Config
from grpo_mega.data import Data
from grpo_mega.models.losses import grpo_loss
from grpo_mega.models.optimizer import warmed_up
from grpo_mega.models.policy import Policy
from grpo_mega.models.reference import ReferencePolicy
from grpo_mega.run import Metrics, Run, StepRecord
from grpo_mega.stages.batches import make_batch, mini_batches, shares
from grpo_mega.stages.metrics import achieved, step_metrics
from grpo_mega.stages.rollouts import Rollouts
from grpo_mega.stages.watch import Watch
from grpo_mega.types import Batch, Group, pack


class GRPO:
    """Reinforcement learning of the policy on answers that can be scored."""

    name = "grpo"

    def __init__(
        self, config: Config, policy: Policy, reference: ReferencePolicy | None, data: Data, rollouts: Rollouts
    ) -> None:
        self.config, self.algorithm, self.data = config, config.algorithm, data
        self.save_every = config.run.save_every
        self.policy, self.reference, self.rollouts = policy, reference, rollouts
        # With a single update per rollout the old policy is the policy itself.
        self.on_policy = config.algorithm.epochs * config.algorithm.mini_batches == 1
        self.loss = grpo_loss(config.algorithm, self.on_policy)
        self.in_progress: StepInProgress | None = None
        self.updates = 0
        self.tokens = {"generated": 0, "trained": 0}
        self.before: Metrics = {}
        self.watch = Watch(config)

    def step(self, run: Run) -> StepRecord:
        """One iteration, or the rest of the one in progress."""
        if self.in_progress is None:
            with run.undone_if_stopped(self.data.train):
                self.in_progress = self.experience(run)
        now = self.in_progress
        for batch in mini_batches(now, self.config, run.step):  # epochs x mini-batches, those that are left
            with run.phase("update"):
                self.update(now, batch)
        metrics = self.evaluated(run) | self.numbers(now)
        self.in_progress = None
        if self.reference and _is_due(self.algorithm.reference_refresh, run.step + 1):
            self.reference.refresh()  # pi_ref <- pi_theta
        return StepRecord(metrics, now.groups)

    def experience(self, run: Run) -> StepInProgress:
        """What the updates of a step are made of: questions, groups of answers, rewards, advantages, log-probs."""
        prompts = self.data.train.take(self.algorithm.prompts_per_step)  # q ~ P(Q)
        groups = self.rollouts.groups(run, prompts, self.algorithm.group_size)  # o_1 ... o_G ~ pi_old, r_1 ... r_G
        now = StepInProgress(groups, make_batch(groups, self.algorithm))  # A_i = (r_i - mean(r)) / std(r)
        with run.phase("logprobs"):
            if now.batch is not None:
                now.batch = self.with_logprobs(run, now.batch)
            else:  # nothing to learn, but whether engine and trainer agree is seen at every step
                now.mismatch = self.mismatch_of_all(groups)
        run.raise_if_stopping()
        return now

    def with_logprobs(self, run: Run, batch: Batch) -> Batch:
        """The batch with the log-probs its updates need."""
        temperature = self.config.rollout.temperature
        if self.reference:
            batch = batch.with_(ref_logprob=self.reference.logprobs(batch, temperature))  # log pi_ref, for the KL term
            run.raise_if_stopping()
        if not self.on_policy:
            batch = batch.with_(old_logprob=self.policy.logprobs(batch, temperature))  # log pi_old
        return batch

    def update(self, now: StepInProgress, batch: Batch) -> None:
        """One optimizer update on the GRPO objective (equation 3), weighted over the global mini-batch."""
        optimizer = self.config.optimizer
        lr = warmed_up(optimizer.lr, optimizer.warmup_steps, self.updates)
        gradients = self.policy.update(batch, self.loss, lr, self.config.rollout.temperature)
        self.updates += 1
        self.tokens["trained"] += int(batch.mask.sum())
        now.updates.append(gradients.metrics)
        if self.on_policy and now.batch is not None:
            now.batch = now.batch.with_(old_logprob=gradients.logprob)

    def mismatch_of_all(self, groups: list[Group]) -> Metrics:
        """How far engine and trainer are apart on all answers of a step."""
        batch = pack([sample for group in groups for sample in group.samples])
        return self.watch.mismatch(batch, self.policy.logprobs(batch, self.config.rollout.temperature))

    def numbers(self, now: StepInProgress) -> Metrics:
        """What is logged of a step whose updates are done."""
        self.tokens["generated"] += sum(len(sample.token_ids) for group in now.groups for sample in group.samples)
        self.watch.signal(now.groups)
        if now.batch is not None:
            now.mismatch = self.watch.mismatch(now.batch, now.batch.old_logprob)
        return step_metrics(now, self.config.reward.success) | now.mismatch | self.rollouts.traffic()

    def evaluated(self, run: Run) -> Metrics:
        """Results on the validation problems, when they are due at the end of this step."""
        if not _is_due(self.config.run.eval_every, run.step + 1):
            return {}
        metrics = self.rollouts.evaluate(run, "validation", self.data.validation, run.step + 1)
        return {f"eval/{name}": value for name, value in metrics.items()}

    def begin(self, run: Run) -> None:
        """Starts at the policy's present weights, which are also those of the reference."""
        self.prepare()
        if self.reference:
            self.reference.refresh()
        self.before = self.rollouts.evaluate(run, "held-out", self.data.test, 0)

    def prepare(self) -> None:
        """Makes the optimizer."""
        self.policy.use_optimizer(self.config.optimizer)

    def is_done(self, steps: int) -> bool:
        """Whether nothing is left to do after so many steps; a step that was begun is finished."""
        return steps >= self.config.run.steps and self.in_progress is None

    def end(self, run: Run) -> None:
        """Measures what was achieved and records it."""
        after = self.rollouts.evaluate(run, "held-out", self.data.test, run.step)
        run.finish(achieved(self.before, after) | {f"tokens_{kind}": count for kind, count in self.tokens.items()})

    def progress(self, step: int) -> str:
        """How far the step in progress has come."""
        if self.in_progress is None:
            return ""
        updates = shares(self.in_progress.groups, self.config, step)
        return f"after {len(self.in_progress.updates)} of {len(updates)} updates"

    def state_dict(self) -> dict[str, Any]:
        """Counters, the order of prompts, and what was measured before."""
        return {
            "updates": self.updates,
            "tokens": self.tokens,
            "before": self.before,
            "steps_without_signal": self.watch.steps_without_signal,
            "prompts": self.data.train.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken."""
        self.updates, self.tokens, self.before = state["updates"], state["tokens"], state["before"]
        self.watch.steps_without_signal = state["steps_without_signal"]
        self.data.train.load_state_dict(state["prompts"])


def _is_due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
