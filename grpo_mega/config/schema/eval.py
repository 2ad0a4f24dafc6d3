"""How evaluations sample."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class EvalConfig:
    """How evaluations sample, during training (run.eval_every) and before and after it."""

    samples: int = 1
    """Sampled answers to each problem; with several, pass@k and maj@k are recorded for k of 2, 4, ... `samples`."""
    temperature: float | None = None
    """Sampling temperature, 0 for the likeliest token; null: rollout.temperature."""
    top_p: float | None = None
    """Nucleus sampling; null: rollout.top_p."""
