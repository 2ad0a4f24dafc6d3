"""On-policy distillation: the policy samples, and a teacher gives the log-prob of each sampled token.

The loop is that of GRPO. The advantage is each token's own, log(teacher / policy): minus the estimate of the reverse KL
(MiniLLM, arXiv 2306.08543; GKD, arXiv 2306.13649, on the student's data only; as a policy gradient: Thinking Machines,
"On-Policy Distillation", 2025). Rewards are measured, and may be added. Groups are not required.
"""

from __future__ import annotations

from typing import Any

from grpo_mega.algorithm.distillation import distillation_advantages, distillation_metrics
from grpo_mega.config.schema import DistillConfig
from grpo_mega.errors import InputError
from grpo_mega.models.reference import Teacher
from grpo_mega.models.topology import Topology
from grpo_mega.rollout.sglang.teacher import ServedTeacher
from grpo_mega.run import Metrics, Run
from grpo_mega.stages.grpo import GRPO, StageParts
from grpo_mega.types import Batch, Step


class Distill(GRPO):
    """Learning from a teacher's log-probs of the policy's own samples."""

    name = "distill"

    def __init__(self, parts: StageParts, teacher: Teacher | ServedTeacher, config: DistillConfig) -> None:
        super().__init__(parts)
        self.teacher, self.distill = teacher, config

    def experience(self, run: Run) -> Step:
        """Experience of a step as in GRPO, with the teacher's log-prob of every token and advantages from these."""
        current = super().experience(run)
        if current.batch is not None:
            with run.phase("teacher"):
                current.batch = with_teacher(current.batch, self.teacher, self.distill, self.temperature)
        return current

    def update(self, current: Step, batch: Batch, step: int) -> None:
        """One optimizer update; its metrics cover all tokens of the step, as sampled."""
        super().update(current, batch, step)
        assert current.batch is not None, "without a batch there are no updates"
        current.updates[-1] |= teacher_metrics(current.batch, self.topology)

    def state_dict(self) -> dict[str, Any]:
        """GRPO's state, and the identity of the teacher."""
        return super().state_dict() | {"teacher": self.teacher.checksum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state of `state_dict`. Raises InputError for a different teacher."""
        if state["teacher"] != self.teacher.checksum:
            raise InputError(
                f"distill.teacher={self.distill.teacher}",
                f"the checksum of its weights is {self.teacher.checksum[:12]}..., but this run began with a teacher of "
                f"checksum {state['teacher'][:12]}...",
                "restore its weights or, if it is a run that has since trained on, name the checkpoint that was its "
                "newest then; to learn from a different teacher, choose a different run.name",
            )
        super().load_state_dict(state)


def teacher_metrics(batch: Batch, topology: Topology) -> Metrics:
    """Metrics of policy and teacher over the tokens of all replicas' batches, as sampled; every rank must call it."""
    assert batch.teacher_logprob is not None, "a batch of this stage has the teacher's log-probs"
    metrics = distillation_metrics(batch.old_logprob, batch.teacher_logprob, batch.mask, topology.replicas)
    return {f"distill/{name}": value for name, value in metrics.items()}


def with_teacher(batch: Batch, teacher: Teacher | ServedTeacher, config: DistillConfig, temperature: float) -> Batch:
    """The replica's batch with the teacher's log-probs, at the temperature of the samples, and advantages from them.

    On input, `advantage` comes from rewards, and `old_logprob` from the policy. Every rank must call it.
    """
    logprob = teacher.logprobs(batch, temperature)
    advantage = distillation_advantages(
        batch.old_logprob, logprob, batch.advantage, batch.mask, config.coef, config.reward_coef
    )
    return batch.with_(teacher_logprob=logprob, advantage=advantage)
