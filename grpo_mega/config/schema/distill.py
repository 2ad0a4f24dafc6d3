"""On-policy distillation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from grpo_mega.config.limits import Interval


@dataclass
class DistillConfig:
    """On-policy distillation: the policy learns from a teacher's log-probs of the policy's own samples, instead of
    rewards or in addition to them (MiniLLM, arXiv 2306.08543; GKD, arXiv 2306.13649). Used when `teacher` is set.
    """

    teacher: str | None = None
    """Teacher: a run directory of grpo_mega (its newest checkpoint), a checkpoint, or a Hugging Face folder, of any
    architecture but with the policy's tokens; null for no distillation."""
    coef: Annotated[float, Interval("(0, inf)")] = 1.0
    """Factor of log(teacher / policy), the advantage of a sampled token: minus the k1 estimate of the reverse KL."""
    reward_coef: Annotated[float, Interval("[0, inf)")] = 0.0
    """Factor of the advantage from rewards, which is added to the teacher's; with 0, rewards are only measured."""
