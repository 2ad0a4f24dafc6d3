"""Learning rate of every update of a stage: warm-up over updates, decay over steps.

Warm-up counts updates: it is for Adam's moments, which only updates fill. Decay counts steps: a step without signal
makes no update, so the number of updates is not known before the end of a run, but the number of steps is. Both counts
are in every checkpoint, so a stop changes no learning rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from grpo_mega.config.schema import OptimizerConfig, PairsConfig, SFTConfig
from grpo_mega.errors import InputError


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up to the peak, and a decay to the floor.

    Attributes:
        peak: The highest learning rate.
        warmup: Updates of warm-up.
        shape: Form of the decay: "constant" (none), "linear", "cosine", or "wsd", which is linear.
        begins: Steps before the decay.
        decay: Steps of the decay.
        floor: Learning rate after the decay, as a share of the peak.
    """

    peak: float
    warmup: int = 0
    shape: str = "constant"
    begins: int = 0
    decay: int = 0
    floor: float = 0.0

    def at(self, update: int, step: int) -> float:
        """Learning rate of update number `update` of the stage, in step number `step`, both from 0."""
        warmed = min(1.0, (update + 1) / self.warmup) if self.warmup else 1.0
        return self.peak * warmed * self.share(step)

    def share(self, step: int) -> float:
        """Share of the peak in step number `step`, from 0: 1 in the first step of the decay, then less.

        Cosine: SGDR (Loshchilov and Hutter, 2017, arXiv 1608.03983, equation 5) without restarts. WSD: MiniCPM (Hu et
        al., 2024, arXiv 2404.06395, section 4.2), which leaves the form of the decay open.
        """
        if self.shape == "constant" or step <= self.begins:
            return 1.0
        done = min(1.0, (step - self.begins) / self.decay) if self.decay else 1.0
        fallen = (1 - math.cos(math.pi * done)) / 2 if self.shape == "cosine" else done
        return self.floor + (1 - self.floor) * (1 - fallen)


def scheduled(config: OptimizerConfig | SFTConfig | PairsConfig, steps: int, updates_per_step: int = 1) -> LearningRate:
    """Configured learning rate of a stage of `steps` steps, each of at most `updates_per_step` updates."""
    # Warm-up counts updates and the decay counts steps: these are the steps that warm-up takes if all of them learn.
    warm = -(-config.warmup_steps // updates_per_step)
    decay = max(0, steps - warm) if config.decay_steps is None else config.decay_steps
    begins = steps - decay if config.schedule == "wsd" else warm
    return LearningRate(config.lr, config.warmup_steps, config.schedule, begins, decay, config.lr_floor)


class Schedule:
    """Learning rates of a stage that may be stopped and resumed with another number of steps.

    Attributes:
        rate: The learning rate of every update.
        updates: Updates of the stage so far.
    """

    def __init__(self, config: OptimizerConfig, steps: int, updates_per_step: int) -> None:
        """Creates the schedule before the first update; see `scheduled`."""
        self._name, self._steps = config.schedule, steps
        self.rate, self.updates = scheduled(config, steps, updates_per_step), 0
        self._decayed = (0, 1.0)  # step of the last update, and its share of the peak

    def next(self, step: int) -> float:
        """Learning rate of the next update, in step number `step` from 0; counts the update."""
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
            InputError: Another number of steps has moved a decay that has begun, so that training so far does not match
                this schedule.
        """
        step, share = state["decayed"]
        # Equal bit for bit if nothing has changed: the same formula was evaluated at the same step.
        if (now := self.rate.share(step)) != share:
            raise InputError(
                f"run.steps={self._steps}",
                f"moves the decay of optimizer.schedule={self._name}, which has begun: step {step + 1} was trained "
                f"at {share:.6g} of optimizer.lr, and would now be at {now:.6g}",
                "restore run.steps, or remove the checkpoints from after the decay began (run.keep_every keeps earlier "
                "ones), or start a new run with run.init_from=CHECKPOINT",
            )
        self.updates, self._decayed = state["updates"], (step, share)
