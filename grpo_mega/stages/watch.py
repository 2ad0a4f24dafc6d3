"""Warnings about a run that goes on and learns nothing, or the wrong thing."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor

from grpo_mega.algorithm.advantage import has_signal
from grpo_mega.algorithm.mismatch import explained_by_rounding, rollout_mismatch
from grpo_mega.config.schema import Config
from grpo_mega.types import Batch, Group

logger = logging.getLogger(__name__)

STEPS_WITHOUT_SIGNAL = 3
"""Steps in a row without any signal before a warning."""


class Watch:
    """What was seen in the steps so far."""

    def __init__(self, config: Config) -> None:
        self.steps_without_signal = 0
        fp8 = config.rollout.engine == "sglang" and config.rollout.sglang.fp8
        self._rounding = explained_by_rounding(config.model.dtype, fp8)
        self._compared = False

    def mismatch(self, batch: Batch, logprob: Tensor) -> dict[str, float]:
        """How far the trainer's log-probs [T] are from the engine's, as metrics.

        Warns when they are not those of the same weights, in the first step after a start.
        """
        mismatch = rollout_mismatch(logprob[batch.mask], batch.rollout_logprob[batch.mask])
        if not self._compared and not mismatch["mean_abs"] <= self._rounding:
            logger.warning(
                "the engine's log-probs differ from the trainer's by %.2g on average and %.2g at most, although both "
                "have the same weights; rounding explains %g: compare their kernels, dtypes and sampling settings",
                mismatch["mean_abs"],
                mismatch["max_abs"],
                self._rounding,
            )
        self._compared = True
        return {f"mismatch/{name}": value for name, value in mismatch.items()}

    def signal(self, groups: Sequence[Group]) -> None:
        """Warns when step after step no group had two different rewards: nothing is being learned."""
        signal = any(has_signal(group.rewards) for group in groups)
        self.steps_without_signal = 0 if signal else self.steps_without_signal + 1
        if self.steps_without_signal == STEPS_WITHOUT_SIGNAL:
            logger.warning(
                "no group had two different rewards for %d steps, so nothing was learned from them: the problems are "
                "too hard or too easy for the policy, or the answer format was never sampled; look at samples/",
                STEPS_WITHOUT_SIGNAL,
            )
