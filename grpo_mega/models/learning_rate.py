"""The learning rate of every update of a stage: warm-up over updates, decay over steps.

Warm-up counts updates: it waits for Adam's moments, which updates alone fill. Decay counts steps: a step without signal
makes no update, so how many updates a run will have is not known before its end, and how many steps is. Both counts are
in every checkpoint, so a stop changes no learning rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from grpo_mega.config.schema import OptimizerConfig, PairsConfig, SFTConfig


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up to the peak, and a decay to the floor.

    Attributes:
        peak: The highest learning rate.
        warmup: Updates of warm-up.
        shape: How it falls: "constant" (not at all), "linear", "cosine", or "wsd", which is linear.
        begins: Steps before the decay.
        decay: Steps of the decay.
        floor: What is left after it, as a share of the peak.
    """

    peak: float
    warmup: int = 0
    shape: str = "constant"
    begins: int = 0
    decay: int = 0
    floor: float = 0.0

    def at(self, update: int, step: int) -> float:
        """The learning rate of update number `update` of the stage, in step number `step`, both from 0."""
        warmed = min(1.0, (update + 1) / self.warmup) if self.warmup else 1.0
        return self.peak * warmed * self.share(step)

    def share(self, step: int) -> float:
        """What the decay leaves of the rate in step number `step`, from 0: 1 in its first step, then less.

        Cosine: SGDR (Loshchilov and Hutter, 2017, arXiv 1608.03983, equation 5) without restarts. WSD: MiniCPM (Hu et
        al., 2024, arXiv 2404.06395, section 4.2), which leaves the form of the decay open.
        """
        if self.shape == "constant" or step <= self.begins:
            return 1.0
        done = min(1.0, (step - self.begins) / self.decay) if self.decay else 1.0
        fallen = (1 - math.cos(math.pi * done)) / 2 if self.shape == "cosine" else done
        return self.floor + (1 - self.floor) * (1 - fallen)


def scheduled(config: OptimizerConfig | SFTConfig | PairsConfig, steps: int, updates_per_step: int = 1) -> LearningRate:
    """The configured learning rate of a stage of so many steps, each of at most so many updates."""
    warm = -(-config.warmup_steps // updates_per_step)
    decay = max(0, steps - warm) if config.decay_steps is None else config.decay_steps
    begins = steps - decay if config.schedule == "wsd" else warm
    return LearningRate(config.lr, config.warmup_steps, config.schedule, begins, decay, config.lr_floor)


class Schedule:
    """The learning rates of a stage that may be stopped, and continued with other numbers of steps.

    Attributes:
        rate: The learning rate of every update.
        updates: Updates of the stage so far.
    """

    def __init__(self, config: OptimizerConfig, steps: int, updates_per_step: int) -> None:
        """The schedule before the first update; see `scheduled`."""
        self._name, self._steps = config.schedule, steps
        self.rate, self.updates = scheduled(config, steps, updates_per_step), 0
        self._decayed = (0, 1.0)  # the step of the last update, and what the decay left of the peak in it

    def next(self, step: int) -> float:
        """The learning rate of the next update, which is counted; it is in step number `step`, from 0."""
        lr = self.rate.at(self.updates, step)
        self.updates += 1
        self._decayed = (step, self.rate.share(step))
        return lr

    def state_dict(self) -> dict[str, Any]:
        """The number of updates, and the last step's share of the peak."""
        return {"updates": self.updates, "decayed": self._decayed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state of `state_dict`.

        Raises:
            ValueError: Another number of steps has moved a decay that has begun, so that what was trained so far is not
                what this schedule would have done.
        """
        step, share = state["decayed"]
        if (now := self.rate.share(step)) != share:
            raise ValueError(
                f"run.steps={self._steps} moves the decay of optimizer.schedule={self._name}, which has begun: "
                f"step {step + 1} was trained at {share:.6g} of optimizer.lr, and would now be at {now:.6g}. Restore "
                "run.steps, or remove the checkpoints from after the decay began (run.keep_every keeps earlier ones), "
                "or start a new run with run.init_from=CHECKPOINT"
            )
        self.updates, self._decayed = state["updates"], (step, share)
