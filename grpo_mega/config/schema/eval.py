"""Sampling of evaluations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from grpo_mega.config.limits import Interval


@dataclass
class EvalConfig:
    """Sampling of evaluations, during training (run.eval_every) and before and after it."""

    samples: Annotated[int, Interval("[1, 256]")] = 1
    """Number of sampled answers to each problem; with several, pass@k and maj@k are recorded for k of 2, 4, ...
    `samples`."""
    temperature: Annotated[float | None, Interval("[0, 1000000]")] = None
    """Sampling temperature, 0 for the likeliest token; null: rollout.temperature."""
    top_p: Annotated[float | None, Interval("(0, 1]")] = None
    """Nucleus sampling; null: rollout.top_p."""
