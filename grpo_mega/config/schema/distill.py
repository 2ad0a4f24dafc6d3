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
    """A run directory of grpo_mega, whose newest checkpoint counts, a checkpoint, or a Hugging Face folder; it has an
    architecture of its own, and the policy's tokens. Or the address of a server of SGLang, http://HOST:PORT, which
    scores on GPUs of its own. Null for no distillation."""
    timeout_seconds: Annotated[float, Interval("(0, inf)")] = 300.0
    """Longest time that a server may take to score a sample."""
    coef: Annotated[float, Interval("(0, inf)")] = 1.0
    """Factor of log(teacher / policy), the advantage of a sampled token: minus the k1 estimate of the reverse KL."""
    reward_coef: Annotated[float, Interval("[0, inf)")] = 0.0
    """Factor of the algorithm's advantage from rewards, which is added to it; with 0 rewards are only measured."""

    @property
    def served(self) -> bool:
        """Whether the teacher is on a server, so that there are no files of it here."""
        return (self.teacher or "").startswith(("http://", "https://"))
