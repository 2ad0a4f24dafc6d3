"""Monitors a run: counts tokens, measures the mismatch with the engine, and warns when nothing is being learned."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from grpo_mega.algorithm.mismatch import explained_by_rounding, rollout_mismatch
from grpo_mega.algorithm.step_advantages import groups_with_signal
from grpo_mega.checkpoint.step_in_progress import StepInProgress
from grpo_mega.config.schema import Config
from grpo_mega.models.learning_rate import Schedule
from grpo_mega.models.noise import moment_sums, noise_in_batches
from grpo_mega.models.policy import Policy
from grpo_mega.models.topology import Topology
from grpo_mega.run import Metrics
from grpo_mega.stages.batches import advantage_options
from grpo_mega.stages.corrections import correction_metrics
from grpo_mega.stages.learned_reward import HackingAlarm
from grpo_mega.stages.metrics import step_metrics
from grpo_mega.stages.shown import with_old_logprobs
from grpo_mega.types import Batch

logger = logging.getLogger(__name__)

STEPS_WITHOUT_SIGNAL = 3
"""Number of consecutive steps without any signal before a warning."""


class Watch:
    """Counters over the steps so far.

    Attributes:
        tokens: Number of tokens "generated" and "trained".
        steps_without_signal: Number of latest consecutive steps in which no group had two different rewards.
    """

    def __init__(self, config: Config, topology: Topology, reward_model: str = "") -> None:
        """Starts with counters at 0; `reward_model` is the checksum of the scoring reward model, empty without one."""
        self._topology, self._success, self._adam = topology, config.reward.success, config.optimizer
        self._algorithm, self._advantages = config.algorithm, advantage_options(config)
        self._temperature = config.rollout.temperature
        # Groups do not matter with a critic, and a teacher gives signal whatever the rewards are.
        self._learns_from_groups = self._advantages.baseline != "critic" and not config.distill.teacher
        self.tokens = {"generated": 0, "trained": 0}
        self.steps_without_signal = 0
        self.hacking = HackingAlarm(reward_model)
        fp8 = config.rollout.engine == "sglang" and config.rollout.sglang.fp8
        self._rounding = explained_by_rounding(config.model.dtype, fp8)
        self._compared = False

    def step(self, current: StepInProgress, policy: Policy, schedule: Schedule) -> Metrics:
        """Metrics of a step after the updates of the policy."""
        self.tokens["generated"] += sum(answer.length for group in current.groups for answer in group.answers)
        signal = []
        if self._learns_from_groups:
            signal = groups_with_signal(current.groups, self._advantages)
            self.signal(signal, any(group.rewards for group in current.groups))
        if current.batch is not None:
            current.mismatch = self.mismatch(current.batch, current.batch.old_logprob)
            current.mismatch |= correction_metrics(current.batch, self._algorithm, self._topology)
        noise = self.noise(policy, schedule) if current.updates else {}
        refilled = {}
        if self._algorithm.groups_without_signal == "refill":
            refilled = {"rollout/refilled": len(current.groups) - self._algorithm.prompts_per_step}
        return step_metrics(current, self._success, signal) | refilled | current.mismatch | noise

    def evaluated(self, measured: Metrics) -> Metrics:
        """Metrics of an evaluation; warns when a reward model seems to be gamed."""
        return {f"eval/{name}": value for name, value in (measured | self.hacking.heard(measured)).items()}

    def mismatch(self, batch: Batch, logprob: Tensor) -> Metrics:
        """Metrics of the difference between the trainer's log-probs [T] and the engine's, over all replicas' batches.

        In the first step after a start, warns when rounding does not explain the difference.
        """
        mismatch = rollout_mismatch(logprob[batch.mask], batch.rollout_logprob[batch.mask], self._topology.replicas)
        if not self._compared and not mismatch.get("mean_abs", 0.0) <= self._rounding:
            logger.warning(
                "the engine's log-probs differ from the trainer's by %.2g on average and %.2g at most, although both "
                "have the same weights; rounding explains %g: compare their kernels, dtypes and sampling settings",
                mismatch["mean_abs"],
                mismatch["max_abs"],
                self._rounding,
            )
        self._compared = True
        return {f"mismatch/{name}": value for name, value in mismatch.items()}

    def compare(self, current: StepInProgress, batch: Batch, policy: Policy) -> None:
        """Measures the mismatch of a step from which nothing is learned, whose samples are all in `batch`."""
        batch = batch.with_(old_logprob=policy.logprobs(batch, self._temperature))
        current.mismatch = self.mismatch(batch, batch.old_logprob)
        current.shown = with_old_logprobs(current, batch, self._topology)

    def noise(self, policy: Policy, schedule: Schedule) -> Metrics:
        """Gradient noise scale of the latest updates, in mini-batches; {} where it cannot be estimated."""
        assert policy.optimizer is not None, "a stage creates it before its first step"
        scale = noise_in_batches(*moment_sums(policy.optimizer), schedule.updates, self._adam.beta1, self._adam.beta2)
        return {} if scale is None else {"policy/gradient_noise_scale": scale}

    def signal(self, of_groups: Sequence[bool], scored: bool = True) -> None:
        """Counts steps in which no group had two different rewards, and warns after several: nothing is learned.

        `scored` says whether some answer of the step has a score.
        """
        self.steps_without_signal = 0 if any(of_groups) else self.steps_without_signal + 1
        if self.steps_without_signal == STEPS_WITHOUT_SIGNAL:
            likely = (
                "the problems are too hard or too easy for the policy, or the answer format was never sampled; look at "
                "samples/"
                if scored
                else "in the last one no answer could be scored; the warnings above say why"
            )
            logger.warning(
                "no group had two different rewards for %d steps, so nothing was learned from them: %s",
                STEPS_WITHOUT_SIGNAL,
                likely,
            )

    def state_dict(self) -> dict[str, Any]:
        """The counters, for a checkpoint."""
        counters = {"tokens": self.tokens, "steps_without_signal": self.steps_without_signal}
        return counters | {"hacking": self.hacking.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state of `state_dict`."""
        self.tokens, self.steps_without_signal = state["tokens"], state["steps_without_signal"]
        self.hacking.load_state_dict(state["hacking"])
